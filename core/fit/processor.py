"""What one token's arithmetic takes on this processor: ggml's own products, with the types and widths of the model."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from bmoe.contracts import ModelFacts, TensorFacts
from bmoe.native import matmul

_IN_LAYER = re.compile(r"blk\.(\d+)\.")
_NO_PRODUCT = re.compile(r"(token_embd|rope_freqs)\b.*|.*(norm|bias|_b|sinks|ssm_a|ssm_d)(\.\w+)?$|.*\.bias|.*\.scale")


@dataclass(frozen=True, slots=True)
class Processor:
    """What the processor does with a token's products.

    ``compute_s`` a token on each of ``threads``, in seconds of its own, not of the clock; ``share`` of its time was
    granted to this process: clearly below 1 where other programs use the cores. ``products`` has GB/s by the clock, by
    type.
    """

    compute_s: float
    share: float
    threads: int
    products: tuple[tuple[str, float], ...]

    def mean(self, other: Processor) -> Processor:
        """Of two measurements at different times, since a processor is now faster and now slower."""
        mine, theirs = self.compute_s / self.share, other.compute_s / other.share
        wall_s = (mine + theirs) / 2
        share = (self.compute_s + other.compute_s) / (mine + theirs) if wall_s else 1.0
        both = zip(self.products, other.products, strict=True)
        rates = tuple((kind, 2 / (1 / a + 1 / b)) for (kind, a), (_, b) in both)
        return Processor(wall_s * share, share, self.threads, rates)


def measure(facts: ModelFacts, threads: int, seconds: float = 0.1) -> Processor:
    """Measure each type and shape of weights for some ``seconds``. Raises NativeError without ggml."""
    work: dict[tuple[str, int, int], int] = defaultdict(int)
    for bank in facts.banks:
        for p in bank.projections:
            # a projection goes from n_embd to the expert's width, or back
            wide = p.suffix.startswith("ffn_down")
            inner = _inner(facts, p.stride, p.type_name)
            width, rows = (inner, facts.n_embd) if wide else (facts.n_embd, inner)
            work[p.type_name, width, rows] += min(bank.n_used, bank.n_expert) * p.stride
    for tensor in active_dense(facts):
        work[tensor.type_name, tensor.shape[0], tensor.shape[1]] += tensor.nbytes
    weights = min(facts.file_bytes, matmul.WEIGHTS)  # a small model stays in the processor's cache
    total = wall_s = cpu_s = 0.0  # wall_s by the clock, cpu_s of all threads together
    rates: dict[str, list[float]] = defaultdict(list)
    known: dict[tuple[str, int, int], tuple[float, float] | None] = {}
    unknown = 0
    for (kind, width, rows), nbytes in sorted(work.items(), key=lambda item: -item[1]):
        key = (kind, width, min(rows, 4096))  # a matrix with more rows is as fast for each of them
        if key not in known:
            known[key] = matmul.seconds_per_byte(kind, width, key[2], threads, seconds=seconds, weights=weights)
        took = known[key]
        if took is None:
            unknown += nbytes
            continue
        total += nbytes
        wall_s += nbytes * took[0]
        cpu_s += nbytes * took[1]
        rates[kind].append(1e-9 / took[0])
    if total:  # a type that this ggml has no product for counts like the others
        wall_s, cpu_s = wall_s * (1 + unknown / total), cpu_s * (1 + unknown / total)
    share = min(1.0, cpu_s / (threads * wall_s)) if wall_s else 1.0
    return Processor(wall_s * share, share, threads, tuple((kind, min(each)) for kind, each in rates.items()))


def active_dense(facts: ModelFacts) -> list[TensorFacts]:
    """The weights outside the routed experts that every token is multiplied by."""
    trunk = facts.n_layer - facts.n_nextn
    named = {t.name: t for t in facts.dense}
    found = []
    for tensor in facts.dense:
        match = _IN_LAYER.match(tensor.name)
        if len(tensor.shape) < 2 or tensor.shape[1] < 2 or (match and int(match[1]) >= trunk):
            continue
        tied = tensor.name == "token_embd.weight" and "output.weight" not in named
        if tied or not _NO_PRODUCT.fullmatch(tensor.name):
            found.append(tensor)
    return found


def _inner(facts: ModelFacts, stride: int, type_name: str) -> int:
    """The width of an expert, from the bytes of a slice."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    return max(1, stride // int(nbytes) * int(block) // facts.n_embd)
