"""A bench as an image: seconds per token over time for every side, and the ratios with their intervals."""

from __future__ import annotations

import importlib.util
import io

from bmoe.bench.result import Result
from bmoe.errors import BmoeError

KINDS = ("png", "svg", "pdf")
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#555555")
_LONGEST = 40


def refuse_without_matplotlib() -> None:
    """Raise :class:`BmoeError` if nothing can be drawn here."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BmoeError("--plot needs matplotlib: pip install 'bmoe[plots]'")


def draw(result: Result, kind: str) -> bytes:
    """An image of one of :data:`KINDS`. A side without a trial is left out."""
    from matplotlib.figure import Figure

    shown = [index for index in range(len(result.sides)) if result.of(index)]
    figure = Figure(figsize=(9, 3.4 + 0.35 * len(result.sides)), layout="constrained")
    tokens, ratios = figure.subplots(1, 2, width_ratios=(3, 2))
    for index in shown:
        colour = _COLOURS[index % len(_COLOURS)]
        label = _label(result, index)
        for trial in result.of(index):
            first = trial.round * len(trial.decode_s)
            tokens.plot(range(first, first + len(trial.decode_s)), [1000 * s for s in trial.decode_s], ".",
                        markersize=3, color=colour, label=label)  # fmt: skip
            label = "_"
    tokens.set(xlabel="measured tokens, round after round", ylabel="ms per token", ylim=(0, None))
    tokens.set_title("decode of each token", loc="left", fontsize="medium")
    if shown:
        tokens.legend(fontsize="small", markerscale=3)
    _ratios(result, ratios)
    for axes in (tokens, ratios):
        axes.spines[["top", "right"]].set_visible(False)
    image = io.BytesIO()
    figure.savefig(image, dpi=120, format=kind)
    return image.getvalue()


def _ratios(result: Result, axes: object) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    found = [(i, c) for i in range(1, len(result.sides)) if (c := result.comparison(i)) is not None]
    axes.axvline(1, color="#222222", linewidth=1)
    for row, (index, compared) in enumerate(found):
        low, high = compared.low or compared.ratio, compared.high or compared.ratio
        colour = _COLOURS[index % len(_COLOURS)]
        axes.errorbar(compared.ratio, row, xerr=[[compared.ratio - low], [high - compared.ratio]], fmt="o", capsize=4,
                      color=colour)  # fmt: skip
    axes.set_yticks(range(len(found)), [_label(result, index) for index, _ in found], fontsize="small")
    axes.set_ylim(len(found) - 0.5 if found else 0.5, -0.5)
    axes.set_xlabel(f"speed over {_label(result, 0)}")
    axes.set_title("ratio and its interval; 1 = equal", loc="left", fontsize="medium")


def _label(result: Result, index: int) -> str:
    """As a person named it, in one short line; matplotlib would read a formula between two dollar signs."""
    label = "".join(char if char.isprintable() else "?" for char in result.sides[index].label).replace("$", r"\$")
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"
