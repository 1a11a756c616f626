"""The single structlog configuration: lines for a person on a terminal, JSON otherwise, always on stderr.

The command line configures it once. As a library bmoe configures nothing: :func:`get_logger` then stays quiet below
warnings, so that an application which never heard of structlog gets no log lines on its stdout.
Nothing is logged per token; per-token data is telemetry.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import structlog

LEVELS = ("debug", "info", "warning", "error")
"""The levels that ``BMOE_LOG`` takes, most talkative first."""


def configure_logging(level: str = "warning", *, stream: TextIO | None = None, colors: bool | None = None) -> None:
    """Send every log line of ``level`` and above to ``stream`` (default: stderr as it is now).

    ``level`` is one of :data:`LEVELS`. A terminal gets readable lines, anything else one JSON object a line; ``colors``
    switches the terminal's colours, which otherwise are on. Raises ValueError for an unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"{level!r} is not a log level ({', '.join(LEVELS)})")
    target = stream or sys.stderr
    terminal = target.isatty()
    renderer: Any = structlog.processors.JSONRenderer(default=str)
    if terminal:
        renderer = structlog.dev.ConsoleRenderer(colors=colors is not False, pad_event_to=0)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if terminal else "iso", utc=not terminal),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_number(level)),
        logger_factory=structlog.PrintLoggerFactory(file=target),
        cache_logger_on_first_use=True,
    )


def get_logger(**facts: Any) -> Any:
    """A logger with ``facts`` bound, for an object to keep; call it where the object is built.

    Follows structlog's configuration where there is one, else prints warnings and errors to stderr.
    """
    if structlog.is_configured():
        return structlog.get_logger(**facts)
    quiet = structlog.make_filtering_bound_logger(_number("warning"))
    return structlog.wrap_logger(structlog.PrintLogger(sys.stderr), wrapper_class=quiet).bind(**facts)


def _number(level: str) -> int:
    return int(getattr(logging, level.upper()))
