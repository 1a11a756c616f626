"""``bmoe synth``: write a model with the shape of a named one and random weights."""

from __future__ import annotations

from collections.abc import Sequence

from bmoe.cli.arguments import Parser, choose
from bmoe.cli.output import emit


def main(arguments: Sequence[str]) -> int:
    """Write the model and say what it is."""
    from bmoe.synth import QUANTS, SHAPES, write_model

    parser = Parser(
        "bmoe synth",
        "Write a gguf file with the shape of a named model and random weights: it computes like the real one and\n"
        f"says nonsense. Shapes: {', '.join(SHAPES)}. Quantisations: {', '.join(QUANTS)}.",
        "bmoe synth tiny.gguf --like tiny-qwen3moe --quant Q4_K --locality 0.8",
    )
    parser.add_argument("out", metavar="OUT", help="the file to write")
    parser.add_argument("--like", metavar="NAME", required=True, help="the shape")
    parser.add_argument("--layers", metavar="N", type=int, help="number of layers (the shape's own)")
    parser.add_argument("--quant", metavar="Q", help="quantisation of the experts (the shape's own)")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="the same seed gives the same bytes (0)")
    parser.add_argument("--sparse", action="store_true", help="leave the experts as holes, which take no disk space")
    parser.add_argument(
        "--locality", metavar="L", type=float, default=0.0, help="0 to 1: how much tokens are routed alike (0)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    parsed = parser.parse(arguments)
    choose(parsed.like, SHAPES, "shape")
    if parsed.quant is not None:
        parsed.quant = choose(parsed.quant.upper(), QUANTS, "quantisation")
    path = write_model(
        parsed.out,
        parsed.like,
        layers=parsed.layers,
        quant=parsed.quant,
        seed=parsed.seed,
        sparse=parsed.sparse,
        locality=parsed.locality,
        overwrite=parsed.overwrite,
    )
    emit(f"{path}: {path.stat().st_size / 2**20:.1f} MiB, the shape of {parsed.like}\n")
    return 0
