"""The token of the server: by a file or the environment, where neither `ps` nor a log shows it."""

import os
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")

from pfml.cli import main

TOKEN = "a token of enough letters"
OTHER = "another token of enough letters"


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Calls `pfml serve` up to the server, and returns who may ask it."""
    found = []
    index = SimpleNamespace(backend_remark="")
    service = SimpleNamespace(gallery=SimpleNamespace(index=index))
    monkeypatch.setattr("pfml.serving.ServerSettings.service", lambda _: service)
    monkeypatch.setattr("pfml.cli.serve.print_model", lambda *_: None)
    monkeypatch.setattr("pfml.serving.serve", lambda service, access, port, log: found.append(access))
    monkeypatch.delenv("PFML_TOKEN", raising=False)

    def start(*options):
        main(["serve", str(tmp_path), "--host=0.0.0.0", *options])
        return found[-1]

    return start


@pytest.fixture
def file(tmp_path):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    return tmp_path / "token"


def test_the_token_may_stand_in_a_file(started, file):
    assert started("--token-file", str(file)).token == TOKEN
    assert started(f"--token_file={file}").token == TOKEN


def test_the_token_may_be_an_environment_variable_that_children_do_not_inherit(started, monkeypatch):
    monkeypatch.setenv("PFML_TOKEN", TOKEN)
    assert started().token == TOKEN
    assert "PFML_TOKEN" not in os.environ


def test_an_option_overrides_the_environment(started, file, monkeypatch):
    for options, expected in ((["--token", OTHER], OTHER), (["--token-file", str(file)], TOKEN)):
        monkeypatch.setenv("PFML_TOKEN", "yet another token of enough letters")
        assert started(*options).token == expected
        assert "PFML_TOKEN" not in os.environ


def test_a_token_is_also_asked_for_on_this_machine(started, monkeypatch):
    monkeypatch.setenv("PFML_TOKEN", TOKEN)
    assert started("--host=127.0.0.1").token == TOKEN


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "a token must have at least 16 characters, got 0"),
        (b"short", "a token must have at least 16 characters, got 5"),
        (f"{TOKEN}\n{OTHER}\n".encode(), "--token-file must hold the token alone, in one line, got 2 lines in"),
        (b"\xff" * 20, "--token-file must be text in UTF-8, got"),
        (None, "No such file"),
    ],
)
def test_a_file_that_holds_no_token_is_refused_without_showing_it(started, tmp_path, content, words):
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    with pytest.raises(SystemExit) as end:
        started("--token-file", str(tmp_path / "token"))
    assert words in str(end.value)
    assert TOKEN not in str(end.value)
    assert OTHER not in str(end.value)


def test_an_empty_variable_does_not_open_the_server(started, monkeypatch):
    monkeypatch.setenv("PFML_TOKEN", "")
    with pytest.raises(SystemExit, match="at least 16 characters, got 0"):
        started("--host=127.0.0.1")


def test_two_tokens_are_refused_without_showing_them(started, file):
    with pytest.raises(SystemExit) as end:
        started("--token", OTHER, "--token-file", str(file))
    assert "give --token or --token-file, not both" in str(end.value)
    assert OTHER not in str(end.value)


def test_without_any_the_ways_to_give_one_are_named(started):
    with pytest.raises(SystemExit, match=r"give --token-file FILE or the environment variable PFML_TOKEN"):
        started()
