"""The access log: one JSON object per answer, without paths, query strings or names of images."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import sys
from datetime import UTC, datetime

__all__ = ["STDERR", "AccessLog"]

#: In place of a file: the terminal, or what systemd and containers collect.
STDERR = "-"


class AccessLog:
    """Writes a line for each answer.

    A file is opened again when it was moved or removed, as log rotation does. Several processes may append to one file.

    Args:
        target: A file, or "-" for stderr.
    """

    def __init__(self, target: str) -> None:
        self.handler: logging.Handler
        if target == STDERR:
            self.handler = logging.StreamHandler(sys.stderr)
        elif os.name == "nt":  # which cannot move an open file
            self.handler = logging.FileHandler(target, encoding="utf-8")
        else:
            self.handler = logging.handlers.WatchedFileHandler(target, encoding="utf-8")
        self.handler.setFormatter(logging.Formatter("%(message)s"))

    def write(
        self,
        *,
        method: str,
        route: str | None,
        status: int | None,
        seconds: float,
        sent: int,
        client: str,
        request_id: str,
    ) -> None:
        """Write a line.

        Args:
            method: Of the request.
            route: The template, such as /api/images/{image}; None if there is none.
            status: Of the answer; None if the client was gone before it.
            seconds: From the head of the request to the end of the answer.
            sent: Bytes of the body.
            client: Its address.
            request_id: As in the header X-Request-ID of the answer.
        """
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "method": method,
            "route": route,
            "status": status,
            "seconds": round(seconds, 6),
            "bytes": sent,
            "client": client,
            "request_id": request_id,
            "process": os.getpid(),
        }
        record = logging.LogRecord("pfml.access", logging.INFO, "", 0, json.dumps(line), (), None)
        self.handler.handle(record)
