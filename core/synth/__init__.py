"""Models with the shape of a named one and random weights, for tests, demos and benchmarks."""

from __future__ import annotations

from bmoe.synth.arguments import QUANTS, ArgumentError
from bmoe.synth.recipes import SHAPES
from bmoe.synth.shapes import Shape
from bmoe.synth.write import write_model

__all__ = ["QUANTS", "SHAPES", "ArgumentError", "Shape", "write_model"]
