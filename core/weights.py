"""Where a model's weights are while it runs: experts in the store, the others where the dense placement wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bmoe.contracts import DensePlacement, DenseTensor, ModelFacts, Placement, Repacking
from bmoe.native import capture, mapping, tensor
from bmoe.native.model import ContextOptions, Model
from bmoe.native.weighing import Weighing


@dataclass(frozen=True, slots=True)
class Bound:
    """What binding came to: what a context took, by kind of memory; bytes of the mapping that were given back.

    ``experts[bank][projection]`` is the address of a projection's tensor; ``weighings[bank]`` says where the graph
    weighs what it chose, None if that was not found.
    """

    buffers: dict[str, int]
    placement: Placement
    released_bytes: int
    experts: list[list[int]]
    weighings: list[Weighing | None]


def find_repacked(
    facts: ModelFacts, placement: DensePlacement, options: ContextOptions, cancelled: Callable[[], bool]
) -> frozenset[str]:
    """Weights that the dense placement wants rearranged and the graph only multiplies by.

    The graph is known once a model is open, and where weights go is decided while it opens: so it is opened twice, the
    first time without reading any weight.
    """
    wanted = frozenset(placement.repacks(facts.dense)) if isinstance(placement, Repacking) else frozenset()
    if not wanted:
        return wanted
    model = Model(facts, keep_experts_out=True, read_dense=False, cancelled=cancelled)
    try:
        found = capture.capture(model, wanted, options)
    finally:
        model.close()
    return wanted & found.tensors.keys() - found.elsewhere


def bind_weights(
    facts: ModelFacts,
    model: Model,
    addresses: Sequence[Sequence[int]],
    placement: DensePlacement,
    repacked: frozenset[str],
    options: ContextOptions,
) -> Bound:
    """Point every expert tensor at ``addresses[bank][projection]``, and let the dense placement see and move the rest.

    Raises ModelError if the graph is not as the architecture's row says.
    """
    experts = {p.tensor: (b, i) for b, bank in enumerate(facts.banks) for i, p in enumerate(bank.projections)}
    dense = {t.name: t for t in facts.dense}
    found = capture.capture(model, {*experts, *dense}, options)
    capture.check_banks(found, facts.banks, facts.path)
    for name, (bank, projection) in experts.items():
        for structure in found.tensors[name]:
            tensor.at(structure).data = addresses[bank][projection]
    bound = [
        DenseTensor(name, tensor.at(structures[0]).data or 0, t.nbytes, t.shard, t.offset)
        for name, t in dense.items()
        if (structures := found.tensors.get(name)) and name not in repacked
    ]
    placed = placement.place(bound)
    for name, address in placed.moved.items():
        for structure in found.tensors[name]:
            tensor.at(structure).data = address
    released = mapping.release(facts, model.bases, {*placed.moved, *repacked})
    where = [[found.tensors[p.tensor][0] for p in bank.projections] for bank in facts.banks]
    weighings = [found.weighings.get(f"ffn_moe_topk-{bank.layer}") if bank.bank == 0 else None for bank in facts.banks]
    return Bound(found.buffers, placed, released, where, weighings)
