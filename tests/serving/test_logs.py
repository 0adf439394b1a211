"""Lines of the log: no request can break or color them."""

import logging
import sys

from pfml.serving.server import LOGGING, OneLine


def line_of(message, *values, error=None):
    record = logging.LogRecord("pfml.test", logging.WARNING, "x.py", 1, message, values, error)
    return OneLine().format(record)


def test_control_characters_are_escaped_and_a_message_is_one_line():
    line = line_of("got %s", "\x1b[31mred\x07\r\n2026-01-01 ERROR all is lost\u2028\x9b2J")
    assert line.isprintable()
    assert "\\x1b[31mred\\x07\\r\\n2026" in line
    assert " WARNING pfml.test: got " in line


def test_a_traceback_keeps_its_lines_but_no_escapes():
    try:
        raise ValueError("a \x1b[2Jname")
    except ValueError:
        text = line_of("failed", error=sys.exc_info())
    assert all(line.isprintable() for line in text.split("\n"))
    assert "\\x1b[2Jname" in text.split("\n")[-1]


def test_warnings_of_the_form_parser_are_not_logged():
    assert LOGGING["loggers"]["python_multipart"]["level"] == "ERROR"
