"""The broker's own log: structured events with job, attempt, pod and cause, on stderr or in a file.

Job output never comes here; it lives in the log store.
"""

import logging
import sys
from pathlib import Path
from typing import Any, TextIO

import structlog


def set_up(level: str = "info", file: Path | None = None, *, as_json: bool | None = None) -> None:
    """Send structured events of `level` and above to `file` (JSON lines) or stderr (words when it is a terminal)."""
    sink: TextIO = file.open("a", buffering=1, encoding="utf-8") if file is not None else sys.stderr
    plain = file is None and sink.isatty() if as_json is None else not as_json
    # Plain tracebacks: the fancy ones show local variables, and those of a request hold its token.
    renderer: Any = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if plain
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if plain else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sink),
        cache_logger_on_first_use=False,
    )
    # The libraries below us speak the standard library's logging; their warnings belong in the same place.
    logging.basicConfig(stream=sink, level=logging.WARNING, format="%(levelname)s %(name)s %(message)s", force=True)
