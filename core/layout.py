"""A gguf's headers → :class:`ModelFacts`: which tensors are experts, and where each expert's bytes lie.

An architecture row names the expert tensors; everything that is a number comes from the file.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from bmoe.contracts import ArchRow, BankFacts, Gating, ModelFacts, ProjectionFacts, ShardFacts, TensorFacts
from bmoe.errors import ModelError
from bmoe.header import Header, TensorEntry, Value
from bmoe.shards import read_shards
from bmoe.states import state_bytes

_EXPERT_NAME = re.compile(r"blk\.(?P<layer>\d{1,9})\.(?P<suffix>\w+_(?:ch)?exps)\.weight", re.ASCII)
_OLD_EXPERT = re.compile(r"blk\.\d{1,9}\.ffn_(gate|up|down)\.\d{1,9}\.weight", re.ASCII)
_FUSED = "ffn_gate_up_exps"
_GATINGS: Mapping[object, Gating] = {1: "softmax", 2: "sigmoid", 3: "softmax-of-selected", 4: "sqrt-softplus"}
"""By their numbers in a file: ``llama_expert_gating_func_type`` of llama.cpp's src/llama-hparams.h."""

_Located = tuple[int, TensorEntry]


def read_model(path: str | os.PathLike[str], rows: Mapping[str, ArchRow]) -> ModelFacts:
    """Read the facts of the model at ``path`` (its first shard) from gguf headers alone; nothing stays open or mapped.

    ``rows`` maps the gguf's ``general.architecture`` to an architecture row. Layers count from 0 and include those of
    a next-token-prediction head (the last ``n_nextn``). Raises :class:`ModelError`, one line that names the file,
    what is wrong and the remedy.
    """
    text = os.fspath(path)
    headers = read_shards(text)
    return _Layout(text, headers, rows).facts()


def kv_elements(values: Mapping[str, Value], arch: str, n_layer: int) -> int:
    """What one token adds to the KV of so many layers, by metadata; 0 if they do not say it in the usual keys."""

    def value(key: str) -> Value | None:
        return values.get(f"{arch}.{key}")

    heads = value("attention.head_count_kv") or value("attention.head_count")
    per_layer = heads[:n_layer] if isinstance(heads, tuple) else (heads,) * n_layer
    count, width = value("attention.head_count"), value("embedding_length")
    each = width // count if isinstance(count, int) and count > 0 and isinstance(width, int) else 0
    lengths = [value(f"attention.{side}_length") or each for side in ("key", "value")]
    if value("attention.key_length_mla") is not None:
        lengths[1] = 0  # latent attention keeps keys and values in one
    known = [n for n in (*per_layer, *lengths) if isinstance(n, int) and n >= 0]
    if len(known) < len(per_layer) + 2:
        return 0
    return sum(known[:-2]) * sum(known[-2:])


class _Layout:
    """One model's headers, seen through the row of its architecture."""

    def __init__(self, path: str, headers: Sequence[Header], rows: Mapping[str, ArchRow]) -> None:
        self._path, self._headers, self._rows = path, headers, rows
        self._values, self._lengths = headers[0].values, headers[0].lengths
        self._tensors: dict[str, _Located] = {}
        for shard, header in enumerate(headers):
            for tensor in header.tensors:
                self._tensors[tensor.name] = (shard, tensor)
        self._arch = self._text("general.architecture")

    def facts(self) -> ModelFacts:
        row = self._row()
        n_layer = self._positive("block_count")
        n_nextn = self._number("nextn_predict_layers", 0)
        n_expert = self._positive("expert_count")
        n_trunk = n_layer - n_nextn
        all_banks = self._banks(row, n_layer, n_trunk, n_expert)
        banks = tuple(bank for bank in all_banks if bank.layer < n_trunk)
        expert_names = {p.tensor for bank in all_banks for p in bank.projections}
        template = self._values.get("tokenizer.chat_template")
        name = self._values.get("general.name")
        return ModelFacts(
            path=self._path,
            name=name if isinstance(name, str) and name else os.path.basename(self._path),
            arch=self._arch,
            shards=tuple(ShardFacts(h.path, h.nbytes) for h in self._headers),
            n_layer=n_layer,
            n_expert=n_expert,
            n_used=max(bank.n_used for bank in banks),
            n_embd=self._positive("embedding_length"),
            n_vocab=self._n_vocab(),
            n_ctx_train=self._positive("context_length"),
            n_nextn=n_nextn,
            banks=banks,
            dense=tuple(
                TensorFacts(t.name, shard, t.offset, t.nbytes, t.shape, t.type_name)
                for shard, t in self._tensors.values()
                if t.name not in expert_names
            ),
            chat_template=template if isinstance(template, str) else None,
            nextn_banks=all_banks[len(banks) :],
            kv_elements=kv_elements(self._values, self._arch, n_trunk),
            state_bytes=state_bytes(
                self._values, self._arch, n_trunk, (tensor for _, tensor in self._tensors.values())
            ),
            n_head=self._n_head(),
            expert_width=max(
                (max(t.shape[:2]) for _, t in self._tensors.values() if t.name in expert_names), default=0
            ),
            gating=_GATINGS.get(self._value("expert_gating_func")[1], row.gating),
            n_group=self._number("expert_group_count", 0),
            n_group_used=self._number("expert_group_used_count", 0),
        )

    # ---- metadata

    def _fail(self, what: str, remedy: str) -> NoReturn:
        raise ModelError(f"{self._path}: {what}; {remedy}")

    def _text(self, key: str) -> str:
        value = self._values.get(key)
        if not isinstance(value, str) or not value.isprintable() or not value:
            self._fail(f"metadata key {key} is missing or no plain text on one line", "convert the model again")
        return value

    def _value(self, key: str) -> tuple[str, Value | None]:
        full = f"{self._arch}.{key}"
        return full, self._values.get(full)

    def _number(self, key: str, default: int | None = None) -> int:
        full, value = self._value(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            self._fail(f"metadata key {full} is {value!r}, not a count", "convert the model again")
        return value

    def _positive(self, key: str) -> int:
        number = self._number(key)
        if number == 0:
            self._fail(f"metadata key {self._arch}.{key} is 0", "convert the model again")
        return number

    def _n_used(self, layer: int) -> int:
        full, value = self._value("expert_used_count")
        if isinstance(value, tuple):
            value = value[layer] if layer < len(value) else None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._fail(f"metadata key {full} gives {value!r} for layer {layer}", "convert the model again")
        return value

    def _n_head(self) -> int:
        heads = self._value("attention.head_count")[1]
        known = [n for n in (heads if isinstance(heads, tuple) else (heads,)) if isinstance(n, int)]
        return max(0, *known) if known else 0

    def _n_vocab(self) -> int:
        if tokens := self._lengths.get("tokenizer.ggml.tokens"):
            return tokens
        return self._positive("vocab_size")

    # ---- tensors

    def _row(self) -> ArchRow:
        has_experts = any(_EXPERT_NAME.fullmatch(name) for name in self._tensors)
        row = self._rows.get(self._arch)
        if row is None or not (has_experts or self._has_experts_of(row)):
            self._refuse(has_experts)
        if row.cannot:
            self._fail(f"architecture {self._arch!r} {row.cannot}", "take another model")
        return row

    def _refuse(self, has_experts: bool) -> NoReturn:
        if old := next(filter(_OLD_EXPERT.fullmatch, self._tensors), None):
            self._fail(
                f"its experts are in the old layout of one tensor each ({old}), which llama.cpp no longer reads",
                "convert the model again, or get a newer conversion",
            )
        if not has_experts:
            self._fail(
                f"a {self._arch} model without routed experts (a dense model): there is nothing to stream",
                "bmoe is for Mixture-of-Experts models under every profile, so run this one with llama.cpp itself",
            )
        known = ", ".join(sorted(self._rows)) or "none"
        near = difflib.get_close_matches(self._arch, self._rows, n=1)
        hint = f", close to {near[0]!r}" if near else ""
        self._fail(
            f"architecture {self._arch!r} has experts but no row is known for it{hint} (known: {known})",
            "add one: a TOML file with its row, named in the profile's plugins.archs",
        )

    def _has_experts_of(self, row: ArchRow) -> bool:
        ends = tuple(f".{suffix}.weight" for bank in row.experts for suffix in bank)
        return any(name.endswith(ends) for name in self._tensors)

    def _banks(self, row: ArchRow, n_layer: int, n_trunk: int, n_expert: int) -> tuple[BankFacts, ...]:
        if n_layer > len(self._tensors):
            self._fail(f"{n_layer} layers in metadata, but {len(self._tensors)} tensors", "convert the model again")
        banks: list[BankFacts] = []
        for layer in range(n_layer):
            for bank, suffixes in enumerate(row.experts):
                suffixes = self._fused(layer, suffixes)
                names = [f"blk.{layer}.{suffix}.weight" for suffix in suffixes]
                missing = [name for name in names if name not in self._tensors]
                if not missing:
                    banks.append(self._bank(layer, bank, names, suffixes, n_expert))
                elif len(missing) < len(names) or (layer < n_trunk and "dense_lead" not in row.has):
                    self._fail(
                        f"expert tensor {missing[0]} of architecture {self._arch!r} is missing",
                        "convert the model again, or correct the row if this model names its experts differently",
                    )
        if not any(bank.layer < n_trunk for bank in banks):
            self._fail(f"no layer has the expert tensors of architecture {self._arch!r}", "correct the row")
        self._refuse_unnamed(banks, n_trunk, n_expert)
        return tuple(banks)

    def _fused(self, layer: int, suffixes: tuple[str, ...]) -> tuple[str, ...]:
        """What a layer's bank consists of: gate and up may be one tensor instead, in the file's own form."""
        parts = {"ffn_gate_exps", "ffn_up_exps"}
        if not parts.issubset(suffixes) or f"blk.{layer}.{_FUSED}.weight" not in self._tensors:
            return suffixes
        return _FUSED, *(suffix for suffix in suffixes if suffix not in parts)

    def _refuse_unnamed(self, banks: Sequence[BankFacts], n_trunk: int, n_expert: int) -> None:
        """Experts that the row does not name would stay in the mapping, with no budget that bounds them."""
        named = {p.tensor for bank in banks for p in bank.projections}
        routed = {bank.layer for bank in banks}.union(range(n_trunk))
        for name, (_, tensor) in self._tensors.items():
            match = _EXPERT_NAME.fullmatch(name)
            if match is None or name in named or len(tensor.shape) != 3 or int(match["layer"]) not in routed:
                continue
            if tensor.shape[2] > 1 and n_expert % tensor.shape[2] == 0:  # fewer in a bank that groups the experts
                self._fail(
                    f"expert tensor {name} is not named by the row of architecture {self._arch!r}",
                    f'add "{match["suffix"]}" to the row\'s experts, in the order of the graph',
                )

    def _bank(self, layer: int, bank: int, names: Sequence[str], suffixes: Sequence[str], n_expert: int) -> BankFacts:
        count: int | None = n_expert if bank == 0 else None  # a second bank may divide the experts into groups
        projections: list[ProjectionFacts] = []
        for name, suffix in zip(names, suffixes, strict=True):
            shard, tensor = self._tensors[name]
            if len(tensor.shape) != 3:
                self._fail(f"expert tensor {name} has the shape {list(tensor.shape)}, not 3 axes", "convert it again")
            if count is None:
                count = tensor.shape[2]
            if tensor.shape[2] != count:
                self._fail(f"expert tensor {name} holds {tensor.shape[2]} experts, not {count}", "convert it again")
            stride = tensor.nbytes // count
            projections.append(ProjectionFacts(name, suffix, shard, tensor.offset, stride, tensor.type_name))
        n_used = self._n_used(layer)
        if bank and count is not None:
            n_used = min(n_used, count)  # as the graph does it
        if count is None or n_used > count:
            self._fail(f"layer {layer} uses {n_used} of {count} experts", "convert the model again")
        return BankFacts(layer, bank, count, n_used, tuple(projections))
