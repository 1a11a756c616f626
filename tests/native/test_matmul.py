"""How fast ggml multiplies: a figure for what it can multiply by, none for what would end the process."""

from __future__ import annotations

import pytest

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

from bmoe.native import matmul, repack


@pytest.mark.parametrize(
    ("kind", "width", "rows"),
    [("Q8_0", 256, 96), ("Q4_K", 256, 4096), ("F32", 32, 4096), ("MXFP4", 64, 32), ("F16", 4096, 1), ("F32", 4, 1)],
)
def test_seconds_per_byte_are_those_of_a_processor(kind, width, rows):
    wall, spent = matmul.seconds_per_byte(kind, width, rows, threads=1)

    assert 1e-13 < wall < 1e-6
    assert 0 < spent < 1.5 * wall


@pytest.mark.parametrize("kind", sorted(repack.type_codes()))
def test_no_type_ends_the_process(kind):
    found = matmul.seconds_per_byte(kind, 256, 64, threads=1)

    assert found is None or found[0] > 0


@pytest.mark.parametrize(("kind", "width"), [("Q4_K", 100), ("MADE_UP", 256), ("I32", 256), ("Q8_1", 256)])
def test_what_has_no_product_has_no_figure(kind, width):
    assert matmul.seconds_per_byte(kind, width, 8, threads=1) is None
