"""The forward pass of a BERT encoder in numpy, as far as the last layer's attention of its first token.

Source: Devlin et al., arXiv 1810.04805; tensor names as in published checkpoints of that form.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Matrix = NDArray[np.float32]


class Encoder:
    """A checkpoint in a folder, with ``config.json`` and ``model.safetensors``, which stays mapped.

    Raises OSError, or ValueError or KeyError if they are damaged or of another form.
    """

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        self.positions: int = config["max_position_embeddings"]
        self._layers: int = config["num_hidden_layers"]
        self._heads: int = config["num_attention_heads"]
        self._epsilon: float = config["layer_norm_eps"]
        self._weights = read_safetensors(folder / "model.safetensors")
        if self._layers < 1 or config["hidden_size"] % self._heads or config["hidden_act"] != "gelu":
            raise ValueError("it is an encoder of another form")
        self.first_attention([0])  # whatever is lacking, lacks now

    def first_attention(self, ids: Sequence[int]) -> Matrix:
        """How much the first token attends to each in the last layer, float32 [n], mean over heads, summing to 1."""
        weights = self._weights
        states = weights["embeddings.word_embeddings.weight"][np.asarray(ids)]
        states = states + weights["embeddings.position_embeddings.weight"][: len(ids)]
        states = self._norm("embeddings", states + weights["embeddings.token_type_embeddings.weight"][0])
        for layer in range(self._layers - 1):
            at = f"encoder.layer.{layer}"
            mixed = self._attention(at, states, states) @ self._split(
                self._linear(f"{at}.attention.self.value", states)
            )
            mixed = mixed.transpose(1, 0, 2).reshape(states.shape)
            states = self._norm(f"{at}.attention.output", self._linear(f"{at}.attention.output.dense", mixed) + states)
            wide = gelu(self._linear(f"{at}.intermediate.dense", states))
            states = self._norm(f"{at}.output", self._linear(f"{at}.output.dense", wide) + states)
        last: Matrix = self._attention(f"encoder.layer.{self._layers - 1}", states[:1], states)[:, 0].mean(axis=0)
        return last

    def _attention(self, at: str, queries: Matrix, keys: Matrix) -> Matrix:
        """Weights of each head, [heads, n queries, n keys]."""
        q = self._split(self._linear(f"{at}.attention.self.query", queries))
        k = self._split(self._linear(f"{at}.attention.self.key", keys))
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        found: Matrix = (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32)
        return found

    def _split(self, states: Matrix) -> Matrix:
        found: Matrix = states.reshape(len(states), self._heads, -1).transpose(1, 0, 2)
        return found

    def _linear(self, at: str, states: Matrix) -> Matrix:
        found: Matrix = states @ self._weights[f"{at}.weight"].T + self._weights[f"{at}.bias"]
        return found

    def _norm(self, at: str, states: Matrix) -> Matrix:
        centred = states - states.mean(axis=-1, keepdims=True)
        scale = 1 / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self._epsilon)
        found: Matrix = (
            centred * scale * self._weights[f"{at}.LayerNorm.weight"] + self._weights[f"{at}.LayerNorm.bias"]
        )
        return found


def gelu(x: Matrix) -> Matrix:
    """``x (1 + erf(x / sqrt 2)) / 2``, with the error function by formula 7.1.26 of Abramowitz and Stegun (1.5e-7)."""
    size = np.abs(x) / np.float32(math.sqrt(2))
    t = 1 / (1 + np.float32(0.3275911) * size)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf = np.copysign(1 - series * np.exp(-size * size), x)
    found: Matrix = (x * (1 + erf) / 2).astype(np.float32)
    return found


def read_safetensors(file: Path) -> dict[str, Matrix]:
    """The float32 tensors of a file, mapped. Raises OSError, or ValueError if it is damaged."""
    memory = np.memmap(file, np.uint8, "r")
    if len(memory) < 8:
        raise ValueError(f"{file} is too short")
    (length,) = struct.unpack("<Q", memory[:8].tobytes())
    if length > len(memory) - 8:
        raise ValueError(f"{file} is too short for its header")
    header: dict[str, dict[str, Any]] = json.loads(memory[8 : 8 + length].tobytes())
    data, found = memory[8 + length :], {}
    for name, facts in header.items():
        if facts.get("dtype") == "F32":
            begin, end = facts["data_offsets"]
            found[name] = data[begin:end].view(np.float32).reshape(facts["shape"])
    return found
