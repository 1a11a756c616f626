"""``bmoe --profile … -p …``: one generation, as text or as JSON lines."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from bmoe.cli.arguments import Parser, UsageError, add_profile_arguments
from bmoe.cli.folders import fetch_memory
from bmoe.cli.interrupt import Interrupt
from bmoe.cli.output import emit, emit_generated, emit_json
from bmoe.cli.prompt import read_prompt
from bmoe.cli.summary import print_summary
from bmoe.errors import ModelError
from bmoe.telemetry import record_json

if TYPE_CHECKING:
    from bmoe.contracts import RunSummary
    from bmoe.conversation import Conversation, Token
    from bmoe.engine import Engine

EXAMPLE = 'bmoe --profile demo -p "Once upon a time" -n 64'


def parser(commands: str = "") -> Parser:
    """The parser of the main command; ``commands`` lists the sub-commands for its help."""
    made = Parser(
        "bmoe",
        "Run a Mixture-of-Experts model that is bigger than memory: experts are read from disk as tokens need them.\n"
        "Text goes to standard output, everything else to standard error."
        + (f"\n\ncommands (bmoe COMMAND --help tells more):\n{commands}" if commands else ""),
        EXAMPLE,
        usage="bmoe --profile NAME|PATH -p TEXT [options]\n       bmoe COMMAND [arguments]",
    )
    made.add_argument("--profile", metavar="NAME|PATH", help="a profile file, or the name of a bundled one")
    add_profile_arguments(made)
    made.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt, as raw text; - reads standard input")
    made.add_argument("-n", "--tokens", metavar="N", type=int, default=128, help="most tokens to generate (128)")
    made.add_argument("--json", action="store_true", help="print JSON lines: run, token, summary")
    made.add_argument("--hash-logits", action="store_true", help="put a SHA-256 of the logits into the summary")
    made.add_argument("--version", action="store_true", help="print versions and exit")
    return made


def run(arguments: argparse.Namespace) -> int:
    """Open the engine and generate; returns the exit code."""
    if arguments.profile is None:
        from bmoe.profile import bundled_profiles

        names = ", ".join(sorted(bundled_profiles()))
        raise UsageError(f"no profile: name one with --profile (a file, or one of {names}); example: {EXAMPLE}")
    if arguments.prompt is None:
        raise UsageError(f"no prompt: give one with -p TEXT, or -p - for standard input; example: {EXAMPLE}")
    if arguments.tokens < 1:
        raise UsageError(f"-n {arguments.tokens}: at least 1 token has to be asked for; example: {EXAMPLE}")
    prompt = read_prompt(arguments.prompt)

    from bmoe.engine import open_engine

    with open_engine(
        arguments.profile, model=arguments.model, overrides=arguments.overrides, remember=fetch_memory()
    ) as engine:
        return generate(engine, prompt, arguments.tokens, as_json=arguments.json, hash_logits=arguments.hash_logits)


def generate(
    engine: Engine, prompt: str | Sequence[int], tokens: int, *, as_json: bool = False, hash_logits: bool = False
) -> int:
    """Generate from ``prompt`` on a new conversation of ``engine``; returns the exit code.

    The text so far and the summary are printed however it ends; what was raised is then raised again.
    """
    with engine.conversation() as conversation, Interrupt(conversation.cancel) as interrupt:
        failure: BaseException | None = None
        last = "\n"
        try:
            if as_json:
                emit_json(record_json(engine.record))
            for token in _started(conversation, prompt, tokens, hash_logits=hash_logits):
                if as_json:
                    emit_json(record_json(token.record))
                elif token.text:
                    emit_generated(token.text)
                    last = token.text[-1]
        except BrokenPipeError:
            raise
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - raised again once the summary is printed
            failure = error
        if last != "\n":
            emit("\n")
        _finish(engine, conversation.summary, as_json=as_json)
    if interrupt.exit_code is not None:
        return interrupt.exit_code
    if failure is not None:
        raise failure
    return 0


def _started(
    conversation: Conversation, prompt: str | Sequence[int], tokens: int, *, hash_logits: bool
) -> Iterator[Token]:
    """The generation; raises :class:`UsageError` for a prompt that cannot be used, which is judged before it begins."""
    try:
        return conversation.generate(prompt, tokens, hash_logits=hash_logits)
    except ModelError as error:
        raise UsageError(str(error)) from error


def _finish(engine: Engine, summary: RunSummary | None, *, as_json: bool) -> None:
    if summary is None:
        return
    if as_json:
        emit_json(record_json(summary))
    else:
        print_summary(summary, engine.record, Console(stderr=True, highlight=False))
