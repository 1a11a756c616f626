"""Finds a model's tensors by a decode that computes nothing: structure decides what is rebound, names only filter.

Every node of a graph is asked about before any of it is computed. So a decode whose hook never closes a group, and
whose abort callback stops it after its first node, shows the whole graph for the price of building it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from bmoe.contracts import BankFacts
from bmoe.errors import ModelError, NativeError
from bmoe.native import lib, tensor
from bmoe.native.model import Context, ContextOptions, Model
from bmoe.native.weighing import Weighing, WeighingFinder

_SECOND = " (copy)"
"""The node that a second bank's ids come from; see evalhook."""


@dataclass(slots=True)
class Captured:
    """Weights by name: addresses of their structures (a tied tensor has several); each bank tensor's ids node.

    ``buffers``: what a context of these options took, as :class:`~bmoe.native.model.Context` has it.
    ``elsewhere`` are those that anything but a product with float32 inputs uses, views and look-ups among them.
    ``weighings`` are by the name of the choice whose experts they weigh.
    """

    tensors: dict[str, list[int]] = field(default_factory=dict)
    routed_by: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)
    weighings: dict[str, Weighing] = field(default_factory=dict)


def capture(model: Model, wanted: Collection[str], options: ContextOptions) -> Captured:
    """Build the graph of one token and note every weight named in ``wanted`` that it uses; computes one node only."""
    found = Captured()
    names = {name.encode(): name for name in wanted}
    routing, product = tensor.op_code("MUL_MAT_ID"), tensor.op_code("MUL_MAT")
    failure: list[BaseException] = []
    finder = WeighingFinder()

    def see(address: int, ask: bool, user: int | None) -> bool:
        try:
            node = tensor.at(address) if ask else None
            if ask:
                finder.see(address)
            for index, source in enumerate(node.src) if node is not None else ():
                name = names.get(tensor.at(source).name) if source else None
                if name is None:
                    continue
                structures = found.tensors.setdefault(name, [])
                if source not in structures:
                    structures.append(source)
                inputs = node.src[1] if node is not None and node.op == product and index == 0 else None
                if not inputs or tensor.at(inputs).type != tensor.TYPE_F32:
                    found.elsewhere.add(name)
                if index == 0 and node is not None and node.op == routing:
                    ids = node.src[2]
                    found.routed_by[name] = tensor.at(ids).name.decode() if ids else ""
        except BaseException as error:  # noqa: BLE001 - nothing may cross C
            failure.append(error)
        return False

    hook, stop = lib.EvalCallback(see), lib.AbortCallback(lambda user: True)
    with Context(model, options, callbacks=(hook, stop)) as context:
        found.buffers.update(context.buffers)
        code = context.decode([0])
    found.weighings.update(finder.found)
    if failure:
        raise failure[0]
    if code not in (0, 2):
        raise NativeError(f"{model.path}: llama_decode returned {code} while the graph was inspected")
    return found


def check_banks(captured: Captured, banks: Collection[BankFacts], path: str) -> None:
    """Raise ModelError unless the graph multiplies by every expert tensor as the architecture row says.

    By MUL_MAT_ID, with the routing of its layer and bank, and in the order of the row: with overlap a product is
    computed before the reads of those after it have arrived.
    """
    for bank in banks:
        names = [projection.tensor for projection in bank.projections]
        for name in names:
            ids = captured.routed_by.get(name)
            if ids is None:
                raise ModelError(
                    f"{path}: {name} is not used by the model's graph; its architecture row is wrong "
                    "(bmoe archs shows it)"
                )
            if ids != (expected := f"ffn_moe_topk-{bank.layer}" if bank.bank == 0 else _SECOND):
                reason = f"{name} is routed by node {ids or 'without a name'}, not by {expected}"
                if bank.bank and ids == f"ffn_moe_topk-{bank.layer}":
                    reason = (
                        f"{name} is in a second bank of its architecture row, and the graph routes it with the first"
                    )
                    raise ModelError(f"{path}: {reason}; put it into the row's first bank")
                raise ModelError(f"{path}: {reason}; this layout is not supported yet")
        order = [name for name in captured.routed_by if name in names]
        if order != names:
            told = ", ".join(name.split(".")[2] for name in order)
            raise ModelError(
                f"{path}: the graph multiplies in another order than the architecture row says: {told} (layer "
                f"{bank.layer}); write experts in this order"
            )
