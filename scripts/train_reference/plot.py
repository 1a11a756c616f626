"""Expert usage as a picture: one row a block, one square an expert, in SVG."""

from __future__ import annotations

from collections.abc import Sequence

SIDE = 18
LEFT, TOP = 92, 30


def usage_svg(usage: Sequence[Sequence[float]], names: Sequence[str]) -> str:
    """Return the picture of shares over the even one (1 is even), each row sorted by use."""
    width, height = LEFT + SIDE * len(usage[0]) + 60, TOP + SIDE * len(usage) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="18">Use of each expert over its even share, most used first</text>',
    ]
    for row, (shares, name) in enumerate(zip(usage, names, strict=True)):
        y = TOP + SIDE * row
        lines.append(f'<text x="{LEFT - 6}" y="{y + 13}" text-anchor="end">{name}</text>')
        for column, share in enumerate(sorted(shares, reverse=True)):
            lines.append(
                f'<rect x="{LEFT + SIDE * column}" y="{y}" width="{SIDE - 1}" height="{SIDE - 1}" '
                f'fill="{_colour(share)}"><title>{share:.2f}</title></rect>'
            )
        lines.append(f'<text x="{LEFT + SIDE * len(shares) + 4}" y="{y + 13}">min {min(shares):.2f}</text>')
    y = TOP + SIDE * len(usage) + 10
    for i, share in enumerate((0.0, 0.5, 1.0, 1.5, 2.0, 3.0)):
        x = LEFT + 60 * i
        lines.append(f'<rect x="{x}" y="{y}" width="{SIDE - 1}" height="{SIDE - 1}" fill="{_colour(share)}"/>')
        lines.append(f'<text x="{x + SIDE + 2}" y="{y + 13}">{share:g}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _colour(share: float) -> str:
    """White for never, blue for even, dark for three times as much and more."""
    depth = min(share, 3.0) / 3.0
    return f"rgb({round(255 - 235 * depth)},{round(255 - 190 * depth)},{round(255 - 110 * depth)})"
