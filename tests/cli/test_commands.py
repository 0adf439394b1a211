"""What the command line says before it has loaded anything."""

import io
import sys

import pytest

from pfml import cli


class Terminal(io.StringIO):
    """A stream that says it is a terminal, or not."""

    def __init__(self, is_terminal):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal


def said(monkeypatch, name, *arguments, is_terminal=True):
    stream = Terminal(is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    before = []
    with cli.said_to_load(name, list(arguments)):
        before.append(stream.getvalue())
    return before[0], stream.getvalue()


def test_a_terminal_hears_of_a_run_at_once_and_the_line_is_gone_when_the_run_speaks(monkeypatch):
    before, after = said(monkeypatch, "train", "--data", "photos")
    assert before == "pfml train: loading ...\r"
    assert after.endswith("\r\x1b[K")


@pytest.mark.parametrize(
    ("name", "arguments", "is_terminal"),
    [("train", [], False), ("train", ["--help"], True), ("train", ["--quiet"], True), ("search", ["run"], True)],
)
def test_nothing_is_said_to_files_with_help_if_quiet_or_where_nothing_is_loaded(
    monkeypatch, name, arguments, is_terminal
):
    assert said(monkeypatch, name, *arguments, is_terminal=is_terminal) == ("", "")
