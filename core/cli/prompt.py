"""Where the prompt comes from: the command line, or standard input."""

from __future__ import annotations

import sys

from bmoe.cli.arguments import UsageError


def read_prompt(given: str) -> str:
    """``given`` itself, or for ``-`` all of stdin, as it is, its last newline included.

    Raises :class:`UsageError` if the prompt is empty or is not UTF-8.
    """
    prompt = _stdin() if given == "-" else given
    if not prompt:
        where = "standard input is empty" if given == "-" else "the prompt is empty"
        raise UsageError(f'{where}; give some text: -p "Once upon a time", or -p - with text on standard input')
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"the prompt is not UTF-8 at character {error.start}; convert it (iconv -t UTF-8)") from error
    return prompt


def _stdin() -> str:
    if sys.stdin is None:
        return ""
    if sys.stdin.isatty():
        print("reading the prompt from the terminal; Ctrl-D ends it", file=sys.stderr)
    try:
        data = sys.stdin.buffer.read()
    except OSError as error:
        raise UsageError(f"standard input: {error.strerror or error}") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise UsageError(
            f"standard input is not UTF-8 at byte {error.start} (0x{byte:02x}); convert it (iconv -t UTF-8)"
        ) from error
