"""An audit of a run that was corrected already, and names that a terminal could misread."""

import csv
import shutil
from dataclasses import replace

import pytest
import torch
from noisy_runs import noisy_config
from PIL import Image

from pfml.cli import main
from pfml.cli.console import create_console, print_scores
from pfml.data import ImageSet
from pfml.data.corrections import Corrections
from pfml.runs.config_files import read_config, write_config
from pfml.runs.data import prepare_data
from pfml.training import run

pytestmark = pytest.mark.usefixtures("without_plots")
COLORS = {"[/blue]": (20, 40, 220), "[red]": (220, 30, 30), "green": (30, 200, 40), "gray": (128, 128, 128)}


@pytest.fixture(scope="module")
def noisy_run(tmp_path_factory):
    """A run on plain colors with label noise, whose class names look like markup."""
    folder = tmp_path_factory.mktemp("images")
    rows = []
    for number, (name, color) in enumerate(COLORS.items()):
        for k in range(8):
            Image.new("RGB", (20, 20), tuple(max(0, level - k) for level in color)).save(folder / f"{number}-{k}.png")
            rows.append((f"{number}-{k}.png", name, "test" if name == "gray" else "train"))
    with open(folder / "table.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "split"), *rows])
    out = tmp_path_factory.mktemp("runs") / "noisy"
    run(noisy_config(folder / "table.csv"), out)
    return out


def test_corrections_of_a_corrected_run_hold_those_before(noisy_run, tmp_path):
    config = read_config(noisy_run / "config.yaml")
    noisy, _ = prepare_data(config.data)
    first = Corrections({0: None, 3: (int(noisy.train.labels[3]) + 1) % 3})
    first.write(tmp_path / "first.csv", noisy.train)
    again = shutil.copytree(noisy_run, tmp_path / "again")
    corrected = replace(config.data, corrections=tmp_path / "first.csv")
    write_config(again / "config.yaml", replace(config, data=corrected))
    trained_on = prepare_data(corrected)[0].train
    name = trained_on.short_names()[9]
    (tmp_path / "decisions.csv").write_text(f"path,decision,label\n{name},drop,\n")
    main(["audit", str(again), "--top", "1", "--apply", "--decisions", str(tmp_path / "decisions.csv")])
    listed = replace(config.data, corrections=again / "audit" / "corrections.csv")
    labels = dict(zip(trained_on.short_names(), trained_on.labels.tolist(), strict=True))
    del labels[name]
    next_one = prepare_data(listed)[0].train
    assert dict(zip(next_one.short_names(), next_one.labels.tolist(), strict=True)) == labels
    assert next_one.short_names()[2] == noisy.train.short_names()[3]
    assert int(next_one.labels[2]) == first.labels[3]


def test_later_corrections_count_what_the_first_ones_left():
    images = ImageSet(torch.zeros(5, 3, 2, 2, dtype=torch.uint8), torch.tensor([0, 0, 1, 1, 1]), ("a", "b"))
    first, later = Corrections({0: None, 2: 0}), Corrections({1: 1, 3: None})
    both = first.then(later, images)
    assert both == Corrections({0: None, 4: None})  # what goes back to its given label is no correction
    twice = later.apply(first.apply(images))
    assert both.apply(images).labels.tolist() == twice.labels.tolist() == [0, 1, 1]


def test_class_names_that_look_like_markup_are_printed_as_they_are(noisy_run, capsys):
    main(["audit", str(noisy_run), "--top", "24"])
    printed = capsys.readouterr().out
    assert "[/blue]" in printed
    assert "[red]" in printed


def test_scores_of_a_run_whose_folder_looks_like_markup_are_printed(capsys):
    print_scores(create_console(), "unseen", {"runs/[/b]": {"recall_at_1": 0.5}})
    assert "runs/[/b]" in capsys.readouterr().out


def test_a_run_keeps_the_corrections_that_it_trained_with(noisy_run, tmp_path):
    config = read_config(noisy_run / "config.yaml")
    noisy, _ = prepare_data(config.data)
    Corrections({0: None}).write(tmp_path / "list.csv", noisy.train)
    run(replace(config, data=replace(config.data, corrections=tmp_path / "list.csv")), tmp_path / "run")
    trained_on = prepare_data(read_config(tmp_path / "run" / "config.yaml").data)[0].train
    Corrections({1: None, 2: None}).write(tmp_path / "list.csv", noisy.train)  # another audit writes there
    kept = read_config(tmp_path / "run" / "config.yaml").data
    assert kept.corrections == tmp_path / "run" / "corrections.csv"
    assert prepare_data(kept)[0].train.fingerprint() == trained_on.fingerprint()
    assert len(trained_on) == len(noisy.train) - 1
