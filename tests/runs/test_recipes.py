"""The recipe that README recommends is the one whose numbers it shows."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from pfml.experiments.catalog import base_config
from pfml.experiments.run_key import all_options
from pfml.methods import LossConfig
from pfml.runs.config import ScheduleConfig
from pfml.runs.config_files import create_config, plain, shipped_config
from pfml.runs.recipes import recipe_config

RESULTS = Path(__file__).parents[2] / "results" / "cub-test.jsonl"
#: Method -> what its runs on CUB's test classes are called.
MEASURED = {
    "pfml-robust": "g recipe",
    "proxy-anchor": "g pa",
    "proxy-anchor-robust": "g pa, trust .3",
    "pfml": "g no proxy pairs",
    "proxy-nca": "g proxy-nca",
    "multi-similarity": "g multi-similarity",
    "soft-triple": "g soft-triple",
    "triplet": "g triplet",
}
#: HIST was measured with Cars' alpha and with a network at a hundredth of the rate of its Gaussians.
MEASURED_HIST = LossConfig("hist", {"alpha": 0.9, "network_lr": 1e-4})
#: Three seeds, with clean and with noisy labels; of some methods five.
RUNS = dict.fromkeys(MEASURED, 6) | dict.fromkeys(("pfml-robust", "proxy-anchor", "proxy-nca"), 10)
#: Which run of a configuration it is, where it computes, and what it shows.
RUN_OPTIONS = ("seed", "device", "evaluate_every", "log_every", "checkpoint_every", "storage", "compile")


def essence(config):
    """All that decides what is learned; options of the loss by their full values."""
    values = {name: value for name, value in plain(config).items() if name not in RUN_OPTIONS}
    values["data"]["root"] = values["data"]["noise"] = values["model"]["weights"] = None
    schedule = config.schedule
    never_steps = schedule.name == "step" and schedule.every >= config.epochs
    values["schedule"] = "constant" if never_steps else schedule.name if schedule.name != "step" else plain(schedule)
    values["loss"] = all_options(config.loss)
    return values


@cache
def stored():
    """All runs on the test classes."""
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def measured(method):
    """The configuration of each run of a method, as it was stored.

    The `trust` of Proxy Anchor was not yet an option then.
    """
    for line in stored():
        if line["candidate"] == MEASURED[method]:
            config, extras = line["config"], line.get("extras", {})
            yield {**config, "loss": {**config["loss"], "options": {**config["loss"]["options"], **extras}}}


def without_run_options(content):
    """The stored configuration without what `essence` leaves out anyway."""
    content = {name: value for name, value in content.items() if name not in RUN_OPTIONS}
    return {**content, "data": {**content["data"], "noise": {}}}


@pytest.mark.parametrize("method", MEASURED)
def test_experiments_train_a_method_on_cub_as_it_was_measured(method):
    runs = list(measured(method))
    assert len(runs) == RUNS[method]
    expected = essence(base_config("cub", "resnet50_he", method))
    for text in {json.dumps(without_run_options(content)) for content in runs}:  # seeds and noise left out, few differ
        assert essence(create_config(json.loads(text))) == expected


def test_hist_was_measured_as_nobody_publishes_it_and_is_not_trained_so_again():
    """What docs/REPRODUCTION.md says of its row."""
    runs = [line["config"] for line in stored() if line["candidate"] == "g hist"]
    assert len(runs) == 6
    today = base_config("cub", "resnet50_he", "hist")
    published = recipe_config("hist", today, published=True)
    for config in runs:
        assert config["loss"] == {"name": "hist", "options": {}}
        assert 0.01 * config["optimizer"]["proxy_lr"] == pytest.approx(MEASURED_HIST.options["network_lr"])
        assert config["batch"] == {"size": 100, "samples_per_class": 4}
        assert config["model"]["layer_norm"] != "embedding"
    assert all_options(today.loss) != all_options(MEASURED_HIST)
    assert all_options(published.loss)["network_lr"] == pytest.approx(6 * MEASURED_HIST.options["network_lr"])
    assert (published.batch.size, published.model.layer_norm) == (32, "embedding")


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("cub-resnet50_he-recipe", "pfml-robust"),
        ("cub-resnet50_he-proxy_anchor", "proxy-anchor"),
        ("cub-resnet50_he-pfml", "pfml"),
    ],
)
def test_that_is_the_shipped_configuration(name, method):
    assert shipped_config(name) == base_config("cub", "resnet50_he", method)


@pytest.mark.parametrize(
    "changes",
    [{"average": 0.5}, {"epochs": 9}, {"schedule": ScheduleConfig("constant")}, {"head_start": "random"}],
)
def test_every_difference_would_show(changes):
    recipe = shipped_config("cub-resnet50_he-recipe")
    assert essence(replace(recipe, **changes)) != essence(recipe)
    milder = replace(recipe, augmentation=replace(recipe.augmentation, flip=0.0))
    assert essence(milder) != essence(recipe)
