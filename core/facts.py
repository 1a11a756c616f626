"""What is known of an architecture and of a model, as frozen data: rows of the table, and what a gguf's headers say.

Plugins take these from :mod:`bmoe.contracts`, which has all that crosses the seam.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Gating: TypeAlias = Literal["softmax", "sigmoid", "softmax-of-selected", "sqrt-softplus", "unknown"]
"""How a router's logits become the experts' weights."""

Trait: TypeAlias = Literal[
    "selection_bias",
    "expert_groups",
    "shared_experts",
    "expert_biases",
    "expert_scales",
    "dense_lead",
    "mtp",
    "denoising",
]
"""What an architecture's models have: a bias that serves the choice of experts only; groups of experts, of which a few
are chosen first; experts that every token uses; a bias or a scale per expert; layers without experts; a head for
next-token prediction; no causal attention, since the model fills in masked tokens. All but the routed experts stays
resident."""


@dataclass(frozen=True, slots=True)
class ArchRow:
    """An architecture as data. Counts, strides and offsets are never here: they are read from the file.

    ``name`` is the gguf's ``general.architecture``. ``experts`` holds, per bank, the suffixes of the expert tensors in
    the order in which the graph multiplies by them (``blk.<layer>.<suffix>.weight``); a file that has gate and up in
    one tensor, ``ffn_gate_up_exps``, needs no other row. ``has`` says what its models have beside routed experts;
    ``cannot`` why no model of it can be run, if so.
    """

    name: str
    experts: tuple[tuple[str, ...], ...] = (("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),)
    gating: Gating = "softmax"
    has: tuple[Trait, ...] = ()
    replaces: str | None = None
    notes: str = ""
    cannot: str = ""


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """One file of a model and its size in bytes."""

    path: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Where a tensor lies: absolute ``offset`` and ``nbytes`` in the file ``shard``; ``shape`` fastest axis first."""

    name: str
    shard: int
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    type_name: str


@dataclass(frozen=True, slots=True)
class ProjectionFacts:
    """One expert tensor of a bank: expert ``e`` is ``stride`` bytes at ``offset + e * stride`` of file ``shard``."""

    tensor: str
    suffix: str
    shard: int
    offset: int
    stride: int
    type_name: str


@dataclass(frozen=True, slots=True)
class BankFacts:
    """The routed experts of one layer that one routing selects from; projections in consumption order."""

    layer: int
    bank: int
    n_expert: int
    n_used: int
    projections: tuple[ProjectionFacts, ...]

    @property
    def entry_bytes(self) -> int:
        """Exact bytes of one expert over all projections (the store counts pages, which are a little more)."""
        return sum(p.stride for p in self.projections)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts of this bank."""
        return self.n_expert * self.entry_bytes


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Everything that is known of a model before llama.cpp opens it; read from gguf headers, never from tensor data.

    ``banks`` are those of the trunk, ``nextn_banks`` those of the MTP head; ``n_layer`` counts both. ``kv_elements`` is
    what one token adds to the KV, over all layers, ``state_bytes`` what recurrent layers keep of a text of any length;
    ``n_head`` the most attention heads of a layer; ``expert_width`` the
    longest vector that goes into, or comes out of, a product with one expert (0 = unknown). ``gating`` is the file's,
    else the row's; of ``n_group`` groups of experts ``n_group_used`` are chosen first (0 = none).
    """

    path: str
    name: str
    arch: str
    shards: tuple[ShardFacts, ...]
    n_layer: int
    n_expert: int
    n_used: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_nextn: int
    banks: tuple[BankFacts, ...]
    dense: tuple[TensorFacts, ...]
    chat_template: str | None = None
    nextn_banks: tuple[BankFacts, ...] = ()
    kv_elements: int = 0
    state_bytes: int = 0
    n_head: int = 0
    expert_width: int = 0
    gating: Gating = "unknown"
    n_group: int = 0
    n_group_used: int = 0

    @property
    def file_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(s.nbytes for s in self.shards)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts."""
        return sum(b.nbytes for b in self.banks)

    @property
    def dense_bytes(self) -> int:
        """Bytes of every tensor that is not a routed expert."""
        return sum(t.nbytes for t in self.dense)

    @property
    def cycle_bytes(self) -> int:
        """Expert bytes that one token touches: the sum over banks of ``min(n_used, n_expert)`` entries."""
        return sum(min(b.n_used, b.n_expert) * b.entry_bytes for b in self.banks)
