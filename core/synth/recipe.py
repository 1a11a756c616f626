"""What a model of an architecture consists of: metadata and tensors, collected by one function per architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from bmoe.synth.shapes import Shape

Role: TypeAlias = Literal["embedding", "output", "norm", "weight", "router", "bias", "decay", "ids", "expert"]
Key: TypeAlias = "int | float | str | Sequence[int] | Sequence[float] | Sequence[bool]"


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor to be written: ``shape`` fastest axis first, ``quant`` its ggml type, ``role`` what fills it.

    Roles: ``norm`` is ones, ``bias`` small, ``decay`` negative, ``ids`` are numbers below ``limit`` of which a row has
    none twice (I32); the others have the deviation that their part in the model asks for.
    """

    name: str
    shape: tuple[int, ...]
    quant: str
    role: Role
    limit: int = 0


class Tensors:
    """Adds tensors below a prefix; the shortest ways to say what most models have."""

    def __init__(self, plans: list[TensorPlan], shape: Shape, prefix: str = "") -> None:
        self.shape = shape
        self._plans = plans
        self._prefix = prefix

    def tensor(self, name: str, axes: Sequence[int], role: Role = "weight", quant: str | None = None) -> None:
        """Add ``name`` as it is, with its ``.weight`` or ``.bias``; ``quant`` of a matrix is by default the shape's."""
        kind = quant or ("F32" if len(axes) == 1 or role in ("norm", "router", "bias", "decay") else self.shape.dense)
        self._plans.append(TensorPlan(self._prefix + name, tuple(axes), kind, role))

    def matrix(self, name: str, n_in: int, n_out: int, bias: bool = False, quant: str | None = None) -> None:
        """Add a projection of ``n_in`` to ``n_out``."""
        self.tensor(f"{name}.weight", (n_in, n_out), quant=quant)
        if bias:
            self.bias(name, n_out)

    def norm(self, name: str, *axes: int, bias: bool = False) -> None:
        """Add a norm's weight (over ``n_embd`` if no axes are given)."""
        self.tensor(f"{name}.weight", axes or (self.shape.n_embd,), "norm")
        if bias:
            self.bias(name, *(axes or (self.shape.n_embd,)))

    def bias(self, name: str, *axes: int) -> None:
        """Add a bias."""
        self.tensor(f"{name}.bias", axes, "bias")


class Layer(Tensors):
    """One block, ``blk.<number>.``."""

    def __init__(self, plans: list[TensorPlan], shape: Shape, number: int, quant: str) -> None:
        super().__init__(plans, shape, f"blk.{number}.")
        self.number = number
        self._quant = quant

    @property
    def is_dense(self) -> bool:
        """Whether it is one of the layers at the start that have no experts."""
        return self.number < self.shape.n_dense

    def attention(
        self, *, biases: Sequence[str] = (), head_norms: bool = False, n_head_kv: int = 0, head_dim: int = 0
    ) -> None:
        """Add query, key, value and output; ``biases`` of "q", "k", "v", "output"; norms over a head if asked for."""
        head_dim = head_dim or self.shape.head_dim
        embd, query = self.shape.n_embd, self.shape.n_head * head_dim
        key = (n_head_kv or self.shape.n_head_kv) * head_dim
        for name, n_in, n_out in (("q", embd, query), ("k", embd, key), ("v", embd, key), ("output", query, embd)):
            self.matrix(f"attn_{name}", n_in, n_out, bias=name in biases)
        if head_norms:
            self.norm("attn_q_norm", head_dim)
            self.norm("attn_k_norm", head_dim)

    def ffn(self, width: int = 0, *, gate: bool = True, end: str = "", bias: bool = False) -> None:
        """Add a dense feed-forward ``ffn_{gate,up,down}<end>`` of ``width`` (the shape's ``n_ff``)."""
        width = width or self.shape.n_ff or self.shape.n_ff_exp
        for name, n_in, n_out in _gated(self.shape.n_embd, width, gate):
            self.matrix(f"ffn_{name}{end}", n_in, n_out, bias=bias)

    def router(self, *, bias: bool = False, selection_bias: bool = False) -> None:
        """Add the router; ``selection_bias`` is added to the scores for the choice alone."""
        self.tensor("ffn_gate_inp.weight", (self.shape.n_embd, self.shape.n_expert), "router")
        if bias:
            self.bias("ffn_gate_inp", self.shape.n_expert)
        if selection_bias:
            self.bias("exp_probs_b", self.shape.n_expert)

    def experts(
        self,
        *,
        gate: bool = True,
        fused: bool | None = None,
        bias: bool = False,
        scale: bool = False,
        width: int = 0,
        n_in: int = 0,
        end: str = "exps",
        count: int = 0,
    ) -> None:
        """Add routed experts: ``ffn_{gate,up,down}_<end>``, gate and up in one tensor if ``fused`` (the shape's).

        ``bias`` and ``scale`` add what stays resident: a bias per row, a scale per expert. ``width`` is the shape's
        ``n_ff_exp``, ``n_in`` its ``n_embd``, ``count`` its ``n_expert``.
        """
        count, width, n_in = count or self.shape.n_expert, width or self.shape.n_ff_exp, n_in or self.shape.n_embd
        parts = list(_gated(n_in, width, gate))
        if gate and (self.shape.fused if fused is None else fused):
            parts = [("gate_up", n_in, 2 * width), parts[-1]]
        for name, rows, n_out in parts:
            quant = self.shape.quant_of(name, self.number, self._quant)
            self.tensor(f"ffn_{name}_{end}.weight", (rows, n_out, count), "expert", quant)
            if bias:
                self.bias(f"ffn_{name}_{end}", n_out, count)
            if scale:
                self.tensor(f"ffn_{name}_{end}.scale", (count,), "norm")

    def shared(self, width: int = 0, *, gate: bool = True, router: bool = False) -> None:
        """Add the experts that every token uses, as one feed-forward; ``router`` gates them by a product."""
        self.ffn(width or self.shape.n_ff_exp * max(1, self.shape.n_shared), gate=gate, end="_shexp")
        if router:
            self.tensor("ffn_gate_inp_shexp.weight", (self.shape.n_embd,), "router")

    def nextn(self) -> None:
        """Add what a layer for next-token prediction has beside: it joins a token with the hidden state before it."""
        embd = self.shape.n_embd
        self.matrix("nextn.eh_proj", 2 * embd, embd)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            self.norm(f"nextn.{name}")


def _gated(n_in: int, width: int, gate: bool) -> tuple[tuple[str, int, int], ...]:
    parts = ("gate", n_in, width), ("up", n_in, width), ("down", width, n_in)
    return parts if gate else parts[1:]


class Recipe(Tensors):
    """Collects a model; a function per architecture fills it from ``shape``.

    ``keys`` are metadata below the architecture's name, but for the tokenizer's, which have their own; those that most
    loaders read are there from the start.
    """

    def __init__(self, shape: Shape, quant: str) -> None:
        self.plans: list[TensorPlan] = []
        super().__init__(self.plans, shape)
        self.quant = quant
        self.keys: dict[str, Key] = common_keys(shape)

    def layers(self) -> Iterator[Layer]:
        """Yield the layers of the trunk."""
        for number in range(self.shape.n_layer):
            yield Layer(self.plans, self.shape, number, self.quant)

    def heads(self) -> Iterator[Layer]:
        """Yield the layers of next-token prediction, which follow the trunk."""
        for number in range(self.shape.n_layer, self.shape.n_block):
            yield Layer(self.plans, self.shape, number, self.quant)

    def embedding(self) -> None:
        """Add the matrix of token embeddings."""
        axes = self.shape.n_embd, self.shape.n_vocab
        self.tensor("token_embd.weight", axes, "embedding", self.shape.embedding)

    def output(self, *, bias: bool = False, norm_bias: bool = False) -> None:
        """Add the last norm and, unless the shape ties it to the embeddings, the matrix of logits."""
        self.norm("output_norm", bias=norm_bias)
        if not self.shape.tied:
            self.tensor("output.weight", (self.shape.n_embd, self.shape.n_vocab), "output", self.shape.output)
        if bias:
            self.bias("output", self.shape.n_vocab)

    def metadata(self) -> dict[str, Any]:
        """The metadata with their full names; a truth value stays one."""
        arch = self.shape.arch
        return {key if key.startswith("tokenizer.") else f"{arch}.{key}": v for key, v in self.keys.items()}


Maker: TypeAlias = Callable[[Recipe], None]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How models of an architecture are made, and the dimensions of its tiny one."""

    arch: str
    fill: Maker
    tiny: Shape


def architecture(arch: str, fill: Maker, **dimensions: Any) -> Architecture:
    """An architecture whose tiny model has the usual dimensions but for those that are given."""
    return Architecture(arch, fill, replace(TINY, name=f"tiny-{arch}", arch=arch, **dimensions))


# 64 rows of 96 weights: no multiple of a page in any quantisation, and more than one page
TINY = Shape(
    "tiny", "", 4, 64, 8, 2, 96, 4, 2, 32, 512, 512,
    quant="Q8_0", dense="F32", embedding="F32", output="F32", rope_base=1e4, tokenizer="gpt-4o", n_ff=160,
)  # fmt: skip


def common_keys(shape: Shape) -> dict[str, Key]:
    """The metadata that most loaders ask for."""
    keys: dict[str, Key] = {
        "block_count": shape.n_block,
        "context_length": shape.n_ctx,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff or shape.n_ff_exp,
        "expert_feed_forward_length": shape.n_ff_exp,
        "expert_count": shape.n_expert,
        "expert_used_count": shape.n_used,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": shape.rope_base,
    }
    if shape.window:
        keys["attention.sliding_window"] = shape.window
    if shape.n_dense:
        keys["leading_dense_block_count"] = shape.n_dense
    if shape.n_shared:
        keys["expert_shared_count"] = shape.n_shared
    if shape.n_nextn:
        keys["nextn_predict_layers"] = shape.n_nextn
    return keys
