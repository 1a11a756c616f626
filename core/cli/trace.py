"""``bmoe trace``: record the routing, the reads or the compute times of a generation, and look at what was recorded."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bmoe.cli.arguments import Parser, UsageError, add_profile_arguments, choose
from bmoe.cli.folders import fetch_memory
from bmoe.cli.output import complain, emit
from bmoe.cli.prompt import read_prompt

if TYPE_CHECKING:
    from bmoe.engine import Engine

EXAMPLE = 'bmoe trace route --profile demo -p "Once upon a time" -n 16 -o demo.route.csv'
WHAT = {
    "route": "Record which experts each token is routed to, layer by layer, and which of them were in memory.\n"
    "A FILE that ends in .parquet holds the probabilities of all experts as well.",
    "io": "Record every read: what, when it was asked for, when it was there, and how long it was waited for.",
    "compute": "Record how long each layer computes beside its reads; with --nodes each node of the graph, which\n"
    "makes the run slower.",
}
_NAMES = {"route": "route.csv", "io": "io.csv", "compute": "compute.csv"}


def main(arguments: Sequence[str]) -> int:
    """Run ``route``, ``io``, ``compute`` or ``view``."""
    actions: dict[str, Callable[[Sequence[str]], int]] = {kind: partial(_record, kind) for kind in WHAT}
    actions["view"] = _view
    if not arguments:
        raise UsageError(f"trace needs one of {', '.join(actions)}; example: {EXAMPLE}")
    if arguments[0] in ("-h", "--help"):
        text = "Record what a generation does, or show what was recorded: bmoe trace route|io|compute|view --help"
        Parser("bmoe trace", text, EXAMPLE).print_help()
        return 0
    return actions[choose(arguments[0], actions, "command of trace")](arguments[1:])


def _record(kind: str, arguments: Sequence[str]) -> int:
    example = f'bmoe trace {kind} --profile demo -p "Once upon a time" -n 16'
    parser = Parser(
        f"bmoe trace {kind}", WHAT[kind] + "\nThe text goes to standard output, as without a trace.", example
    )
    parser.add_argument("--profile", metavar="NAME|PATH", help="a profile file, or the name of a bundled one")
    add_profile_arguments(parser)
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt, as raw text; - reads standard input")
    parser.add_argument("-n", "--tokens", metavar="N", type=int, default=128, help="most tokens to generate (128)")
    parser.add_argument("-o", "--out", metavar="FILE", default=_NAMES[kind], help=f"the trace ({_NAMES[kind]})")
    if kind == "compute":
        parser.add_argument("--nodes", action="store_true", help="time each node of the graph")
    parsed = parser.parse(arguments)
    for option, value in (("--profile", parsed.profile), ("-p", parsed.prompt)):
        if value is None:
            raise UsageError(f"{option} is missing; example: {example}")
    if parsed.tokens < 1:
        raise UsageError(f"-n {parsed.tokens}: at least 1 token has to be asked for; example: {example}")
    prompt = read_prompt(parsed.prompt)

    from bmoe.cli.run import generate
    from bmoe.engine import open_engine

    overrides = [*parsed.overrides, f"trace.{kind}={_quoted(parsed.out)}"]
    if kind == "compute" and parsed.nodes:
        overrides.append("trace.detail=node")
    engine: Engine | None = None
    try:
        with open_engine(parsed.profile, parsed.model, overrides, remember=fetch_memory()) as engine:
            code = generate(engine, prompt, parsed.tokens)
    finally:
        lost = engine.tracing.failures() if engine is not None else []
        if engine is not None and not lost:
            for kind_, trace in engine.tracing.written.items():
                if trace.rows:
                    complain(f"{engine.tracing.paths[kind_]}: {trace.rows} rows")
    return code or int(bool(lost))  # the log has said why


def _quoted(path: str) -> str:
    """A path as a TOML string. Raises :class:`UsageError` for one that no file can have."""
    if not path or not path.isprintable():
        raise UsageError(f"-o {path!r}: is no name of a file")
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _view(arguments: Sequence[str]) -> int:
    parser = Parser(
        "bmoe trace view",
        "Make one HTML page of traces and of run records (lines of the sink jsonl): hit rate and experts over time,\n"
        "hot experts, where the time of a token went, reads. It needs no network and no other file.",
        "bmoe trace view demo.route.csv -o demo.html",
    )
    parser.add_argument(
        "files", metavar="FILE", nargs="+", help="a trace of routings, reads or compute times, or jsonl"
    )
    parser.add_argument("-o", "--out", metavar="OUT", help="the page (the first FILE's name with .html, here)")
    parsed = parser.parse(arguments)

    from bmoe.trace.page import write_page

    out = parsed.out if parsed.out is not None else f"{Path(parsed.files[0]).name}.html"
    notices = write_page(parsed.files, out)
    for notice in notices:
        complain(notice)
    emit(f"{out}: {os.stat(out).st_size / 1024:,.0f} KiB; open it in a browser\n")
    return 0
