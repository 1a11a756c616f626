"""Where a model's weights are while it runs: experts in the store, the others where the dense placement wants them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from bmoe.contracts import DensePlacement, DenseTensor, ModelFacts, Placement, Repacking
from bmoe.native import capture, mapping, mtp, tensor
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
    facts: ModelFacts,
    placement: DensePlacement,
    options: ContextOptions,
    cancelled: Callable[[], bool],
    *,
    head: bool = False,
) -> frozenset[str]:
    """Weights that the dense placement wants rearranged and the graph only multiplies by.

    The graph is known once a model is open, and where weights go is decided while it opens: so it is opened twice, the
    first time without reading any weight. ``head``: the one for next-token prediction is opened too.
    """
    wanted = frozenset(placement.repacks(facts.dense)) if isinstance(placement, Repacking) else frozenset()
    if not wanted:
        return wanted
    model = Model(facts, keep_experts_out=True, read_dense=False, load_mtp=head, cancelled=cancelled)
    try:
        found = _captured(model, wanted, options)
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

    The head for next-token prediction has its banks after the trunk's if the model was opened with it.

    Raises ModelError if the graph is not as the architecture's row says.
    """
    banks = (*facts.banks, *facts.nextn_banks) if model.has_head else facts.banks
    experts = {p.tensor: (b, i) for b, bank in enumerate(banks) for i, p in enumerate(bank.projections)}
    dense = {t.name: t for t in facts.dense}
    found = _captured(model, {*experts, *dense}, options)
    capture.check_banks(found, banks, facts.path)
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
    where = [[found.tensors[p.tensor][0] for p in bank.projections] for bank in banks]
    weighings = [found.weighings.get(f"ffn_moe_topk-{bank.layer}") if bank.bank == 0 else None for bank in banks]
    return Bound(found.buffers, placed, released, where, weighings)


def _captured(model: Model, wanted: Collection[str], options: ContextOptions) -> capture.Captured:
    """What the graph of the trunk uses, and that of the head if the model was opened with it; buffers are the trunk's.

    Both share structures of tensors, as that of the output matrix.
    """
    found = capture.capture(model, wanted, options)
    if model.has_head:
        more = capture.capture(model, wanted, mtp.of_head(options))
        for name, structures in more.tensors.items():
            found.tensors[name] = list(dict.fromkeys([*found.tensors.get(name, ()), *structures]))
        found.routed_by.update(more.routed_by)
        found.weighings.update(more.weighings)
        found.elsewhere |= more.elsewhere
    return found
