"""What layers that keep one state for the whole text hold in memory, by a file's header: convolutions and recurrences.

llama.cpp keeps them in float32. Source of the sizes: ``n_embd_r`` and ``n_embd_s`` in its src/llama-hparams.cpp, and
src/llama-kv-cache-dsv4.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Protocol

from bmoe.header import Value

SNAPSHOTS = frozenset(
    {
        "bailingmoe3",
        "deepseek4",
        "glm5-next",
        "kimi-k3",
        "lfm2",
        "lfm2moe",
        "nemotron_h",
        "nemotron_h_moe",
        "qwen35",
        "qwen35moe",
        "qwen4exp",
    }
)
"""Architectures of which llama.cpp can keep the states behind each token of a decode: ``llm_arch_supports_rs_rollback``
in its src/llama-arch.cpp."""

_TENSOR = re.compile(r"blk\.(?P<layer>\d+)\.(?P<name>.+?)(?:\.weight)?", re.ASCII)
_CONVOLUTIONS = ("ssm_conv1d", "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v", "shortconv.conv")


class Tensor(Protocol):
    """What is looked at of a tensor."""

    @property
    def name(self) -> str:
        """As the file says."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Fastest axis first."""


def state_bytes(values: Mapping[str, Value], arch: str, n_layer: int, tensors: Iterable[Tensor]) -> int:
    """Bytes of the states of one text in the first ``n_layer`` layers; 0 for a model without."""
    layers: dict[int, dict[str, tuple[int, ...]]] = {}
    for tensor in tensors:
        found = _TENSOR.fullmatch(tensor.name)
        if found is not None and int(found["layer"]) < n_layer:
            layers.setdefault(int(found["layer"]), {}).setdefault(found["name"], tensor.shape)

    def number(key: str) -> int:
        value = values.get(f"{arch}.{key}")
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    heads = number("attention.head_count")
    total = 0
    for shapes in layers.values():
        for name in _CONVOLUTIONS:
            kernel, *channels = shapes.get(name, (1,))
            total += (kernel - 1) * math.prod(channels)
        if "ple_conv1d" in shapes:
            kernel, *channels = shapes["ple_conv1d"]
            total += (kernel - 1) * number("ple.ngram_size") * math.prod(channels)
        if "ssm_conv1d" in shapes:
            total += number("ssm.state_size") * number("ssm.inner_size")
        if "ssm_conv1d_q" in shapes:
            total += number("kda.head_dim") ** 2 * heads
        if "attn_norm_2" in shapes and arch == "minimax-01":
            total += number("attention.key_length") ** 2 * heads
        if arch == "deepseek4":
            total += sum(_compressed(*shapes[name]) for name in shapes if name.endswith("_compressor_ape"))
    return 4 * total


def _compressed(width: int, ratio: int) -> int:
    """Elements of keys and scores that wait to become one key; groups of 4 overlap."""
    return 2 * width * ratio * (2 if ratio == 4 else 1)
