"""What a model file is, from its headers alone: also of one that cannot be streamed, with the reason."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bmoe.contracts import ArchRow, ModelFacts, Trait
from bmoe.errors import ModelError
from bmoe.header import Header, TensorEntry, Value
from bmoe.layout import read_model
from bmoe.shards import read_shards

_CLASSES = (
    ("routed experts", r"blk\.\d+\.\w+_(?:ch)?exps\.weight"),
    ("experts' biases and scales", r"blk\.\d+\.\w+_(?:ch)?exps\..*"),
    ("shared experts", r"blk\.\d+\.ffn_\w+_shexp\..*"),
    ("routers", r"blk\.\d+\.(?:ffn_gate_inp|exp_probs_b)\b.*"),
    ("next-token prediction", r"(?:blk\.\d+\.)?nextn\..*"),
    ("norms", r".*norm\w*\.(?:weight|bias)"),
    ("dense feed-forward", r"blk\.\d+\.ffn_.*"),
    ("attention", r"blk\.\d+\.(?:attn|indexer)_?.*"),
    ("recurrence and convolution", r"blk\.\d+\.(?:ssm|shortconv|time_mix)[_.].*"),
    ("embedding", r"token_embd\.weight"),
    ("output", r"output\.(?:weight|bias)"),
)
_OTHER = "others"
_IN_LAYER = re.compile(r"blk\.(\d{1,9})\.(.*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class TensorClass:
    """Tensors that serve the same purpose: how many of each ggml type, and their bytes."""

    name: str
    types: Mapping[str, int]
    nbytes: int

    @property
    def count(self) -> int:
        """How many tensors."""
        return sum(self.types.values())


@dataclass(frozen=True, slots=True)
class Inspection:
    """A model file: what it says, and what bmoe makes of it.

    ``row`` is None for an unknown architecture, ``facts`` if it cannot be streamed; ``reason`` says why not. ``traits``
    are those that this file shows. Counts that it does not say are None.
    """

    path: str
    name: str | None
    arch: str | None
    row: ArchRow | None
    facts: ModelFacts | None
    reason: str
    traits: tuple[Trait, ...]
    shards: tuple[tuple[str, int], ...]
    n_layer: int | None
    n_expert: int | None
    n_ctx_train: int | None
    n_embd: int | None
    n_vocab: int | None
    chat_template: str | None
    classes: tuple[TensorClass, ...]

    @property
    def file_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(nbytes for _, nbytes in self.shards)


def inspect_model(path: str | os.PathLike[str], rows: Mapping[str, ArchRow]) -> Inspection:
    """Inspect the model at ``path``, its first shard. Raises :class:`ModelError` if its headers cannot be read."""
    text = os.fspath(path)
    headers = read_shards(text)
    values = headers[0].values
    arch = _text(values.get("general.architecture"))
    facts, reason = None, ""
    try:
        facts = read_model(text, rows)
    except ModelError as error:
        reason = str(error).removeprefix(f"{text}: ")

    def number(key: str) -> int | None:
        value = values.get(f"{arch}.{key}")
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

    return Inspection(
        path=text,
        name=_text(values.get("general.name")),
        arch=arch,
        row=rows.get(arch or ""),
        facts=facts,
        reason=reason,
        traits=tuple(_traits(headers, facts)) if facts else (),
        shards=tuple((h.path, h.nbytes) for h in headers),
        n_layer=number("block_count"),
        n_expert=number("expert_count"),
        n_ctx_train=number("context_length"),
        n_embd=number("embedding_length"),
        n_vocab=headers[0].lengths.get("tokenizer.ggml.tokens", number("vocab_size")),
        chat_template=_text(values.get("tokenizer.chat_template")),
        classes=tuple(_classes(headers)),
    )


def _traits(headers: Sequence[Header], facts: ModelFacts) -> Iterator[Trait]:
    """What the file has beside routed experts, in the order of :data:`~bmoe.contracts.Trait`."""
    trunk = facts.n_layer - facts.n_nextn
    routed = {bank.layer for bank in facts.banks}
    names = [tensor.name for header in headers for tensor in header.tensors]
    in_routed = {match[2] for name in names if (match := _IN_LAYER.fullmatch(name)) and int(match[1]) in routed}
    groups = headers[0].values.get(f"{facts.arch}.expert_group_count", 0)
    found: dict[Trait, bool] = {
        "selection_bias": any(suffix.startswith("exp_probs_b") for suffix in in_routed),
        "expert_groups": isinstance(groups, int) and groups > 1,
        "shared_experts": any("_shexp." in suffix for suffix in in_routed) or "ffn_up.weight" in in_routed,
        "expert_biases": any(suffix.endswith("exps.bias") for suffix in in_routed),
        "expert_scales": any(suffix.endswith("exps.scale") for suffix in in_routed),
        "dense_lead": len(routed) < trunk,
        "mtp": facts.n_nextn > 0,
        "denoising": headers[0].values.get(f"{facts.arch}.attention.causal") is False,
    }
    return (trait for trait, shown in found.items() if shown)


def _text(value: Value | None) -> str | None:
    return value if isinstance(value, str) and value else None


def _classes(headers: Sequence[Header]) -> Iterator[TensorClass]:
    patterns = [(name, re.compile(pattern, re.ASCII | re.DOTALL)) for name, pattern in _CLASSES]
    found: dict[str, list[TensorEntry]] = {name: [] for name, _ in (*_CLASSES, (_OTHER, ""))}
    for header in headers:
        for tensor in header.tensors:
            name = next((name for name, pattern in patterns if pattern.fullmatch(tensor.name)), _OTHER)
            found[name].append(tensor)
    for name, tensors in found.items():
        if tensors:
            types = Counter(tensor.type_name for tensor in tensors)
            yield TensorClass(name, dict(types.most_common()), sum(tensor.nbytes for tensor in tensors))
