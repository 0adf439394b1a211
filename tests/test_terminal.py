"""A name cannot command the terminal that it is printed to."""

import os
import subprocess

import pytest
import torch
from PIL import Image
from rich.table import Table
from rich.text import Text

from pfml.cli import main
from pfml.cli.console import create_console
from pfml.cli.error_reporting import exit_with_error
from pfml.models import create_embedder
from pfml.terminal import plain_console, print_line, shell_words, visible
from pfml.training.progress import ProgressMonitor

#: Clears the screen, renames the window, turns the text, rings; and the same in C1.
HOSTILE = "finch\x1b[2J\x1b]0;owned\x07\u202egpj.\r\x9b2J\x7f"
COMMANDS = ("\x1b[2J", "\x1b]", "\x07", "\u202e", "\r", "\x9b", "\x7f")


def assert_harmless(printed: str) -> None:
    assert "finch" in printed
    assert not [command for command in COMMANDS if command in printed]
    assert "\\x1b" in printed


def test_commands_are_written_out_and_all_else_stays():
    assert visible("Bücherei 鳥 [bold]\tx\ny") == "Bücherei 鳥 [bold]\tx\ny"
    assert visible("a\x1b[31mb") == "a\\x1b[31mb"
    assert visible("\udcff.png").encode() == b"\\xff.png"  # a byte of a file name that is no UTF-8
    assert_harmless(visible(HOSTILE))


@pytest.fixture
def sent(monkeypatch, capsys):
    """Gives what was sent since the last time to what rich takes for a terminal with colors."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    return lambda: capsys.readouterr().out


def test_lines_tables_remarks_and_progress_show_names_as_text(sent):
    console = create_console()
    print_line(console, HOSTILE)
    assert_harmless(sent())
    table = Table("class", title=HOSTILE)
    table.add_row(Text(HOSTILE))
    console.print(table)
    assert_harmless(sent())
    ProgressMonitor().remark(HOSTILE)
    assert_harmless(sent())
    assert list(ProgressMonitor(console).track([1, 2], HOSTILE, 2)) == [1, 2]
    assert_harmless(sent().replace("\r", ""))  # a progress bar has movements of its own


def test_colors_of_its_own_still_reach_the_terminal(sent):
    plain_console().print("[red]red[/red]")
    assert "\x1b[31mred" in sent()


def test_the_error_that_a_command_ends_with_is_text(capsys):
    with pytest.raises(SystemExit) as caught:
        exit_with_error("pfml train", ValueError(HOSTILE))
    assert_harmless(str(caught.value.code))
    with pytest.raises(SystemExit):
        exit_with_error("pfml train", ValueError(HOSTILE), status=2)
    assert_harmless(capsys.readouterr().err)


@pytest.fixture
def photos(tmp_path):
    """Four classes of which one has a hostile name, and a broken file of a hostile name."""
    for name in (HOSTILE, "robin", "siskin", "wren"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for k in range(3):
            Image.new("RGB", (40, 40), (60 * k, 90, 200)).save(tmp_path / "photos" / name / f"{k}.png")
    (tmp_path / "photos" / "robin" / f"{HOSTILE}.png").write_bytes(b"no image")
    return tmp_path / "photos"


@pytest.mark.usefixtures("one_thread")
def test_index_and_search_print_hostile_names_as_text(photos, tmp_path, capsys):
    torch.manual_seed(0)
    create_embedder("convnet", embedding_dim=8).save(tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        main(["index", str(tmp_path / "run"), str(photos)])
    assert ended.value.code == 3, "a file was left out"
    assert_harmless(capsys.readouterr().out)
    main(["search", str(tmp_path / "run"), str(photos / HOSTILE / "0.png"), "--k", "3"])
    assert_harmless(capsys.readouterr().out)


def test_broken_files_of_hostile_names_are_listed_as_text(photos, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", "--data", str(photos), "--data.unreadable", "refuse"])
    assert "1 of 13 images cannot be read" in str(caught.value.code)
    assert_harmless(str(caught.value.code) + "".join(capsys.readouterr()))


def test_captions_of_pictures_have_hostile_names_as_text():
    from pfml.pages.page import short

    assert_harmless(short(HOSTILE, length=200))


@pytest.mark.parametrize("word", ["plain", "my photos", "it's", "caf\udce9", "a\x1b[31m'\\x\udcff é", "$HOME\udc80"])
def test_printed_words_mean_themselves_to_a_shell_and_nothing_to_a_terminal(word):
    typed = shell_words("printf", "%s", word)
    assert visible(typed) == typed
    got = subprocess.run(["bash", "-c", typed], capture_output=True, check=True).stdout
    assert got == os.fsencode(word)


def test_bytes_that_are_no_utf_8_are_shown_as_bytes():
    assert visible("caf\udce9") == r"caf\xe9"


def test_a_cell_of_a_notebook_is_no_terminal_although_jupyter_asks_for_colors(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    assert plain_console().is_terminal
    assert plain_console(stderr=True).is_terminal
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    assert not plain_console().is_terminal
    assert not plain_console(stderr=True).is_terminal
    track = ProgressMonitor(create_console()).track
    assert list(track(range(3), "embedding", 3)) == [0, 1, 2]
    assert capsys.readouterr().out == ""
