"""What llama.cpp would compute for a model: every node of a prompt's graph, without computing it."""

from __future__ import annotations

from dataclasses import dataclass

from bmoe.contracts import ModelFacts
from bmoe.native import lib, tensor
from bmoe.native.model import Context, ContextOptions, Model


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that a node reads: which structure, and where its data lie."""

    name: str
    address: int
    data: int


@dataclass(frozen=True, slots=True)
class Node:
    """What ``op`` makes of its sources; a view of what ``view_of`` made, "" if it is none."""

    name: str
    op: str
    ne: tuple[int, ...]
    sources: tuple[Source, ...]
    view_of: str


def graph_of(facts: ModelFacts, n_tokens: int) -> list[Node]:
    """The nodes for a prompt of so many tokens, in order: all are asked about before the first is computed."""
    nodes: list[Node] = []

    def see(address: int, ask: bool, user: int | None) -> bool:
        if ask:
            nodes.append(_node(tensor.at(address)))
        return False

    hook, stop = lib.EvalCallback(see), lib.AbortCallback(lambda user: True)
    model = Model(facts, keep_experts_out=False)
    try:
        with Context(model, ContextOptions(ctx=64, ubatch=32), callbacks=(hook, stop)) as context:
            context.decode([300 + i for i in range(n_tokens)])
    finally:
        model.close()
    return nodes


def _node(it: tensor.GgmlTensor) -> Node:
    """A copy, since llama.cpp uses the memory again."""
    sources = [(address, tensor.at(address)) for address in it.src if address]
    return Node(
        it.name.decode(),
        _op(it),
        tuple(it.ne),
        tuple(Source(source.name.decode(), address, source.data or 0) for address, source in sources),
        _op(tensor.at(it.view_src)) if it.view_src else "",
    )


def _op(it: tensor.GgmlTensor) -> str:
    return bytes(lib.ggml().ggml_op_name(it.op)).decode()
