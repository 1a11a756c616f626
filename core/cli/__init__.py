"""The command ``bmoe``: finds the sub-command, maps errors to exit codes, and alone reads the environment.

Exit codes: 0, 1 model, native or read failure, 2 profile, plugin or usage, 130 Ctrl-C (143 for SIGTERM).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from bmoe.cli import run as main_command
from bmoe.cli.arguments import UsageError, choose, did_you_mean
from bmoe.cli.output import abandon_stdout, complain, emit
from bmoe.errors import BmoeError
from bmoe.log import LEVELS, configure_logging

COMMANDS = {
    "profile": "check, show, list or make profiles",
    "plugins": "list plugins, their options and where they come from",
    "inspect": "tell what a model file is and whether it can be streamed",
    "doctor": "tell whether bmoe runs on this machine, and what would make it better",
    "fit": "tell whether a model runs here, with which profile and how fast",
    "archs": "list the architectures whose experts can be streamed",
    "gates": "run the tests that a plugin has to pass",
    "bench": "compare the speed of settings, with an interval and a verdict only where there is one",
    "eval": "measure quality on a file of texts, questions or problems",
    "replay": "replay routing traces against cache policies",
    "trace": "record routings, reads or compute times, and show them on a page",
    "synth": "write a model with the shape of a named one and random weights",
}
"""Sub-commands: each is the module of its name in this package, with ``main(arguments) -> int``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (default: the process's own) and return the exit code.

    A :class:`BmoeError` becomes one line per problem on stderr; anything else is a bug and keeps its traceback.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _set_up_log()
        return _dispatch(given)
    except BmoeError as error:
        complain(str(error))
        return error.exit_code
    except BrokenPipeError:
        abandon_stdout()
        return 0
    except KeyboardInterrupt:
        return 130
    except SystemExit as done:  # argparse, after --help
        return done.code if isinstance(done.code, int) else 0


def _dispatch(given: list[str]) -> int:
    if given and not given[0].startswith("-"):
        if given[0] not in COMMANDS:
            known = ", ".join(COMMANDS)
            close = did_you_mean(given[0], COMMANDS)
            raise UsageError(f'"{given[0]}" is not a command{close} ({known}); text to continue is given with -p')
        command = importlib.import_module(f"bmoe.cli.{given[0]}")
        return int(command.main(given[1:]))
    parsed = main_command.parser("\n".join(f"  {name:9} {text}" for name, text in COMMANDS.items())).parse(given)
    if parsed.version:
        emit(version_line())
        return 0
    return main_command.run(parsed)


def version_line() -> str:
    """The versions that a bug report needs."""
    from bmoe.telemetry import versions

    found = versions()
    return f"bmoe {found['bmoe']} (llama-cpp-python {found['llama-cpp-python']}, Python {found['python']})\n"


def _set_up_log() -> None:
    level = os.environ.get("BMOE_LOG", "").strip().lower() or "warning"
    try:
        choose(level, LEVELS, "log level")
    except UsageError as error:
        raise UsageError(f"BMOE_LOG: {error}") from error
    if sys.stderr is not None:
        configure_logging(level, colors=not os.environ.get("NO_COLOR"))
