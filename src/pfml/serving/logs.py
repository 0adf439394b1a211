"""What the server says on its terminal: one line for each thing, which no request can break or color."""

from __future__ import annotations

import logging
import re
from typing import Any

__all__ = ["LOGGING", "OneLine"]

#: Characters that move the cursor, color or clear a terminal, or begin a line.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


class OneLine(logging.Formatter):
    """Time, level, who says it, and the message with its control characters escaped; a traceback has its lines."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """The line of a record."""
        record.message = CONTROL.sub(_escaped, record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's own name
        """The traceback of a record."""
        return "\n".join(CONTROL.sub(_escaped, line) for line in super().formatException(ei).split("\n"))


#: For `logging.config.dictConfig`, as uvicorn takes it.
LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"()": OneLine}},
    "handlers": {"terminal": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}},
    "root": {"handlers": ["terminal"], "level": "WARNING"},
    "loggers": {
        # a body that is no form is the client's affair, who is told: 400
        "python_multipart": {"level": "ERROR"},
        "multipart": {"level": "ERROR"},
    },
}
