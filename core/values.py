"""What one value of a profile may be: numbers in a range, choices, text and paths, each refusal with its remedy."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from bmoe.problems import suggest


def _limits(low: float, high: float | None, above: bool) -> str:
    if high is None:
        return f"above {low:.12g}" if above else f"of at least {low:.12g}"
    return f"above {low:.12g} and up to {high:.12g}" if above else f"from {low:.12g} to {high:.12g}"


def number(
    low: float, high: float | None = None, *, whole: bool = False, auto: bool = False, above: bool = False
) -> BeforeValidator:
    """Accept a number in a range, or "auto"; a bool is no number here."""
    kind = "a whole number" if whole else "a number"
    or_auto = ' or "auto"' if auto else ""
    remedy = f"give {kind} {_limits(low, high, above)}{or_auto}"

    def check(value: Any) -> Any:
        if auto and value == "auto":
            return value
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise ValueError(f"is not {kind}; {remedy}")
        if not low <= value or (above and value == low) or (high is not None and value > high):
            raise ValueError(f"is out of range; {remedy}")
        return value

    return BeforeValidator(check)


def choice(*known: str | bool) -> BeforeValidator:
    """Accept one of ``known`` only; the refusal lists them."""

    def check(value: Any) -> Any:
        # 1 == True in Python, but not in a profile.
        if any(value == k and isinstance(value, bool) == isinstance(k, bool) for k in known):
            return value
        flags = " or true, false" if True in known else ""
        raise ValueError(f"is not a choice here; {suggest(value, [k for k in known if isinstance(k, str)])}{flags}")

    return BeforeValidator(check)


def _flag(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("is not true or false; write true or false without quotes")
    return value


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("is not text; put it in quotes")
    if not value:
        raise ValueError("is empty; give it a value or leave the key out")
    return value


def _file(value: Any) -> Any:
    if _text(value).startswith("~"):
        raise ValueError("starts with ~, which only a shell expands; write the whole path")
    if "\0" in value:
        raise ValueError("holds a NUL character; correct the path")
    return value


Flag = Annotated[bool, BeforeValidator(_flag)]
Text = Annotated[str, BeforeValidator(_text)]
FilePath = Annotated[str, BeforeValidator(_file)]
OptionTable = dict[str, Any]
