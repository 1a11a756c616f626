"""glm4moe in numpy, trunk and head for next-token prediction, and small models whose next token is known.

The formula is that of ``src/models/glm4-moe.cpp`` in llama.cpp, written down again in float64 for comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float64]


class Formula:
    """The forward pass of a float32 file, over one sequence from position 0 on."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.w = {t.name: t.data.astype(np.float64).reshape([int(n) for n in t.shape[::-1]]) for t in reader.tensors}

        def key(name: str) -> Any:
            return reader.get_field(f"glm4moe.{name}").contents()

        self.heads, self.kv_heads = key("attention.head_count"), key("attention.head_count_kv")
        self.size, self.rotary = key("attention.key_length"), key("rope.dimension_count")
        self.base, self.epsilon = key("rope.freq_base"), key("attention.layer_norm_rms_epsilon")
        self.used, self.scale = key("expert_used_count"), key("expert_weights_scale")
        self.dense, self.trunk_layers = key("leading_dense_block_count"), key("block_count") - 1

    def trunk(self, tokens: list[int]) -> tuple[Rows, Rows]:
        """Hidden states after the output norm, and logits."""
        x = self.w["token_embd.weight"][tokens]
        for layer in range(self.trunk_layers):
            x = self.block(x, layer)
        hidden = self.norm(x, "output_norm")
        return hidden, hidden @ self.w["output.weight"].T

    def head(self, tokens: list[int], hidden: Rows) -> tuple[Rows, Rows]:
        """Its hidden states and logits; row i of ``hidden`` is of the position before ``tokens[i]``."""
        name = f"blk.{self.trunk_layers}.nextn"
        own = self.norm(self.w["token_embd.weight"][tokens], f"{name}.enorm")
        joined = np.concatenate([own, self.norm(hidden, f"{name}.hnorm")], -1)
        x = self.block(joined @ self.w[f"{name}.eh_proj.weight"].T, self.trunk_layers)
        state = self.norm(x, f"{name}.shared_head_norm")
        return state, state @ self.w["output.weight"].T

    def block(self, x: Rows, layer: int) -> Rows:
        """Attention and feed-forward of a layer."""
        at = f"blk.{layer}"
        x = x + self.attention(self.norm(x, f"{at}.attn_norm"), at)
        normed = self.norm(x, f"{at}.post_attention_norm")
        if layer < self.dense:
            return x + self.gated(normed, f"{at}.ffn_", ".weight")
        return x + self.experts(normed, at) + self.gated(normed, f"{at}.ffn_", "_shexp.weight")

    def attention(self, x: Rows, at: str) -> Rows:
        """Causal, with grouped keys and values."""
        n = len(x)

        def projected(which: str, heads: int) -> Rows:
            rows = x @ self.w[f"{at}.attn_{which}.weight"].T + self.w[f"{at}.attn_{which}.bias"]
            return rows.reshape(n, heads, self.size)

        q = self.rotated(self.norm(projected("q", self.heads), f"{at}.attn_q_norm"))
        k = self.rotated(self.norm(projected("k", self.kv_heads), f"{at}.attn_k_norm"))
        shared = self.heads // self.kv_heads
        k, v = np.repeat(k, shared, 1), np.repeat(projected("v", self.kv_heads), shared, 1)
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(self.size)
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hij,jhd->ihd", weights, v).reshape(n, -1) @ self.w[f"{at}.attn_output.weight"].T

    def rotated(self, x: Rows) -> Rows:
        """The first ``rotary`` entries of each head, in pairs half of that apart."""
        half = self.rotary // 2
        angles = np.arange(len(x))[:, None] * self.base ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = x[..., :half], x[..., half : self.rotary]
        return np.concatenate([a * cos - b * sin, a * sin + b * cos, x[..., self.rotary :]], -1)

    def experts(self, x: Rows, at: str) -> Rows:
        """Chosen by the biased scores, weighted by the unbiased."""
        scores = 1 / (1 + np.exp(-(x @ self.w[f"{at}.ffn_gate_inp.weight"].T)))
        chosen = np.argsort(-(scores + self.w[f"{at}.exp_probs_b.bias"]), -1)[:, : self.used]
        weights = np.take_along_axis(scores, chosen, -1)
        weights *= self.scale / weights.sum(-1, keepdims=True)
        out = np.zeros_like(x)
        for token, (row, shares) in enumerate(zip(chosen, weights, strict=True)):
            for expert, share in zip(row, shares, strict=True):
                out[token] += share * self.gated(x[token], f"{at}.ffn_", "_exps.weight", expert)
        return out

    def gated(self, x: Rows, before: str, after: str, expert: int | None = None) -> Rows:
        """SwiGLU."""
        gate, up, down = (self.w[f"{before}{part}{after}"] for part in ("gate", "up", "down"))
        if expert is not None:
            gate, up, down = gate[expert], up[expert], down[expert]
        opened = x @ gate.T
        return (opened / (1 + np.exp(-opened)) * (x @ up.T)) @ down.T

    def norm(self, x: Rows, name: str) -> Rows:
        """RMS norm over the last axis."""
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon) * self.w[f"{name}.weight"]


def rewrite(path: Path, change: Callable[[str, NDArray[np.float32]], None]) -> Path:
    """Let ``change`` alter every tensor of a float32 file in place; rows as numpy has them, slowest axis first."""
    reader = gguf.GGUFReader(path, "r+")
    for tensor in reader.tensors:
        change(tensor.name, tensor.data)
    reader.data.flush()
    return path


def successor(token: int, n_vocab: int = 512) -> int:
    """The token that follows another one in a model made by :func:`chain`."""
    return (token * 7 + 3) % n_vocab


def chain(path: Path, *, head_sees: str) -> Path:
    """Make each token's successor certain; the head predicts from the ``token`` at hand or the ``state`` before it."""
    embedding: list[NDArray[np.float32]] = []

    def change(name: str, data: NDArray[np.float32]) -> None:
        if name == "token_embd.weight":
            embedding.append(data.copy())
        elif "attn_output" in name or "ffn_down" in name:
            data[:] = 0  # no layer adds anything
        elif "norm.weight" in name:
            data[:] = 1
        elif "eh_proj" in name:
            half = data.shape[0]
            data[:] = 0
            data[:, :half] += np.eye(half, dtype=np.float32) if head_sees == "token" else 0
            data[:, half:] += np.eye(half, dtype=np.float32) if head_sees == "state" else 0

    def output(name: str, data: NDArray[np.float32]) -> None:
        if name == "output.weight":
            for token, row in enumerate(embedding[0]):
                data[successor(token)] = row

    return rewrite(rewrite(path, change), output)
