"""Command lines: parsers with an example in their help, one-line usage errors, *did you mean*."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from bmoe.cli.output import emit
from bmoe.errors import BmoeError

_NUMBERS = {"int": "a whole number", "float": "a number"}
_WRONG_NUMBER = re.compile(r"argument (-[^/:]*)(?:/[^:]*)?: invalid (int|float) value: (['\"])(.*)\3", re.DOTALL)
_NO_VALUE = re.compile(r"argument (-[^/:]*)(?:/[^:]*)?: expected one argument")

_MANY = 16


class UsageError(BmoeError):
    """The command line itself is wrong; names what to write instead."""

    exit_code = 2


class Parser(argparse.ArgumentParser):
    """An argparse parser that never abbreviates, shows an example, and raises :class:`UsageError`."""

    def __init__(self, prog: str, description: str, example: str, **options: Any) -> None:
        self.example = example
        super().__init__(
            prog=prog,
            description=description,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse ``arguments``; raises :class:`UsageError`, exits for ``--help``."""
        found, extra = self.parse_known_args(list(arguments))
        if extra:
            self.error(self._unexpected(extra[0]))
        return found

    def error(self, message: str) -> NoReturn:
        """Raise the usage error in one line, with the example."""
        wrong = _WRONG_NUMBER.fullmatch(message)
        if wrong:
            message = f"{wrong[1]} {wrong[4]}: is not {_NUMBERS[wrong[2]]}"
        elif found := _NO_VALUE.fullmatch(message):
            message = f"{found[1]} needs a value (one that starts with - is written --option=VALUE)"
        raise UsageError(f"{message}; example: {self.example}")

    def _print_message(self, message: str, file: Any = None) -> None:
        # what argparse leaves in a buffer fails when Python exits, if the reader of --help is gone by then
        emit(message)

    def _unexpected(self, argument: str) -> str:
        if not argument.startswith("-") or argument == "-":
            return f'unexpected argument "{argument}" (a command comes first: bmoe COMMAND …)'
        name = argument.partition("=")[0]
        return f"unknown option {name}{did_you_mean(name, self._option_string_actions)}"


def add_profile_arguments(parser: Parser) -> None:
    """Add ``--model`` and ``--set``, which refine a profile."""
    parser.add_argument(
        "--model", metavar="PATH", help="model file, or the name of a bundled one, instead of the profile's model.path"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one key of the profile (cache.budget_mb=512); may be repeated",
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"; did you mean X?"`` if one of ``known`` is close to ``name``, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def choose(name: str, known: Iterable[str], what: str) -> str:
    """``name`` if it is one of ``known``; raises :class:`UsageError` otherwise, which lists them if they are few."""
    names = list(known)
    if name in names:
        return name
    close = did_you_mean(name, names)
    listed = "" if close and len(names) > _MANY else f" ({', '.join(names)})"
    raise UsageError(f'"{name}" is not a {what}{close}{listed}')
