"""The recipe that README recommends is the one whose numbers it shows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pfml.experiments.base_configs import base_config
from pfml.experiments.planned_run import all_options
from pfml.training.config import BatchConfig, OptimizerConfig, ScheduleConfig
from pfml.training.config_files import plain, shipped_config
from pfml.training.methods import LossConfig

RESULTS = Path(__file__).parents[2] / "results" / "cub-test.jsonl"
#: Configuration of the package -> what its runs on CUB's test classes are called.
MEASURED = {"recipe": "f recipe", "proxy_anchor": "f pa", "pfml": "f no proxy pairs"}
#: Where a run is, and what it shows.
OF_THE_PLACE = ("seed", "device", "evaluate_every", "log_every", "storage", "compile")


def essence(config):
    """All that decides what is learned, options of the loss by their full values."""
    values = plain(config)
    for name in OF_THE_PLACE:
        del values[name]
    values["data"]["root"] = values["data"]["noise"] = values["model"]["weights"] = None
    if values["schedule"]["name"] in ("constant", "cosine"):
        values["schedule"] = values["schedule"]["name"]
    values["loss"] = all_options(config.loss)
    return values


def measured(kind):
    """The configurations of the runs, as the package reads them today."""
    base = shipped_config(f"cub-resnet50_he-{kind}")
    for line in map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines()):
        if line["candidate"] != MEASURED[kind]:
            continue
        config = line["config"]
        schedule = ScheduleConfig(**config["schedule"])
        if schedule.name == "step" and schedule.every > config["epochs"]:
            schedule = ScheduleConfig("constant")
        yield replace(
            base,
            loss=LossConfig(**config["loss"]),
            batch=BatchConfig(**config["batch"]),
            optimizer=OptimizerConfig(**config["optimizer"]),
            schedule=schedule,
            model=replace(base.model, **config["model"]),
            augmentation=replace(base.augmentation, scale=tuple(config["augmentation"]["scale"])),
            **{name: config[name] for name in ("epochs", "warm_up_epochs", "head_start", "batch_norm", "autocast")},
        )


@pytest.mark.parametrize("kind", MEASURED)
def test_a_shipped_configuration_is_the_one_that_was_measured(kind):
    runs = list(measured(kind))
    assert len(runs) == 6, "three seeds, clean and with wrong labels"
    for run in runs:
        assert essence(run) == essence(shipped_config(f"cub-resnet50_he-{kind}"))


def test_experiments_train_the_recipe_as_it_is_shipped():
    assert base_config("cub", "resnet50_he", "pfml-robust") == shipped_config("cub-resnet50_he-recipe")
    assert base_config("cub", "resnet50_he", "proxy-anchor") == shipped_config("cub-resnet50_he-proxy_anchor")
