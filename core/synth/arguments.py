"""What a synthetic model may be asked to be, and where it may be written; what cannot be names its argument."""

from __future__ import annotations

import dataclasses
import difflib
import os
import stat
from pathlib import Path

from bmoe.errors import ModelError
from bmoe.synth.blocks import BLOCK
from bmoe.synth.recipes import SHAPES
from bmoe.synth.shapes import MIXES, Shape

QUANTS = (*BLOCK, *MIXES)
_MAX_LAYERS = 1024
_KINDS = {
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symbolic link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


class ArgumentError(ModelError):
    """An argument of :func:`~bmoe.synth.write_model` cannot be: its name, value, and the ``reason`` with a remedy."""

    def __init__(self, argument: str, value: object, reason: str, text: str = "") -> None:
        self.argument, self.value, self.reason = argument, value, reason
        super().__init__(text or f"{argument} = {value!r} {reason}")


class TargetError(ArgumentError):
    """There can be no model at the place that was named."""

    def __init__(self, value: str, reason: str) -> None:
        super().__init__("out", value, reason, f"{value or 'OUT'}: {reason}")


def check_shape(like: str | Shape, layers: int | None, seed: int, locality: float) -> Shape:
    """The shape that is asked for. Raises :class:`ArgumentError`."""
    if isinstance(like, str) and like not in SHAPES:
        near = difflib.get_close_matches(like, SHAPES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ArgumentError("like", like, f"is no known shape{hint} ({', '.join(sorted(SHAPES))})")
    if layers is not None and not 1 <= layers <= _MAX_LAYERS:
        raise ArgumentError("layers", layers, f"is out of range; give 1 to {_MAX_LAYERS}")
    if seed < 0:
        raise ArgumentError("seed", seed, "is negative; give 0 or more")
    if not 0.0 <= locality <= 1.0:
        raise ArgumentError("locality", locality, "is out of range; give 0 to 1")
    shape = SHAPES[like] if isinstance(like, str) else like
    if layers is not None and layers <= shape.n_dense:
        reason = f"is too few: the first {shape.n_dense} of {shape.name} have no experts; give more"
        raise ArgumentError("layers", layers, reason)
    return shape if layers is None else dataclasses.replace(shape, n_layer=layers)


def check_quant(quant: str | None, shape: Shape) -> str:
    """The quantisation of the experts of ``shape``. Raises :class:`ArgumentError`."""
    name = (quant or shape.quant).upper()
    if name not in QUANTS:
        near = difflib.get_close_matches(name, QUANTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ArgumentError("quant", quant, f"cannot be synthesised{hint} ({', '.join(QUANTS)})")
    block = _block(name)
    for width in (shape.n_embd, shape.n_ff_exp):
        if width % block:
            reason = f"has blocks of {block} weights and {shape.name} rows of {width}"
            raise ArgumentError("quant", name, f"{reason}; choose of {', '.join(fitting_quants(shape))}")
    return name


def fitting_quants(shape: Shape) -> list[str]:
    """The quantisations that the experts of ``shape`` can have: their rows are whole blocks."""
    return [name for name in QUANTS if not shape.n_embd % _block(name) and not shape.n_ff_exp % _block(name)]


def _block(quant: str) -> int:
    return max(BLOCK[kind][0] for kind in MIXES.get(quant, (quant,)))


def check_target(out: str | os.PathLike[str], overwrite: bool) -> Path:
    """The path to write to: nothing is there, or a regular file that may be replaced. Raises :class:`ArgumentError`.

    A link is refused like a device: the rename would replace it, not what it leads to.
    """
    name = os.fspath(out)
    if not name:
        raise TargetError(name, "is empty; name the file to write")
    path = Path(name)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise TargetError(name, f"cannot be made: the folder {path.parent} does not exist; make it first") from None
        if name.endswith(os.sep):
            raise TargetError(name, "names a directory; name a file in it") from None
        return path
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TargetError(name, f"cannot be written ({reason}); name another file") from error
    if stat.S_ISDIR(mode):
        raise TargetError(name, "is a directory; name a file in it")
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "special file")
        raise TargetError(name, f"is a {kind}, which is never replaced; name a regular file or a new one")
    if not overwrite:
        raise TargetError(name, "exists already; replace it with --overwrite (overwrite=True), or choose another name")
    return path


def claim_part(path: Path, overwrite: bool) -> Path:
    """An empty file beside ``path`` to write to, of this process alone.

    Raises :class:`TargetError` if one is there (of another process, or left by one that was killed), unless it is a
    regular file that ``overwrite`` may replace; OSError if none can be made.
    """
    part = path.with_name(path.name + ".part")
    try:
        mode = part.lstat().st_mode
    except FileNotFoundError:
        pass
    else:
        if not (overwrite and stat.S_ISREG(mode)):
            reason = "exists already: another run writes it, or one that was killed left it; then remove it"
            raise TargetError(str(part), reason)
        part.unlink()
    os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    return part
