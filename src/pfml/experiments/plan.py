"""The runs that an experiment consists of: planned from the catalog, and from what a user chooses."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pfml.experiments.catalog import (
    BACKBONE_DIMS,
    DATASET_BACKBONES,
    EXPERIMENTS,
    THEORY,
    Experiment,
    Variant,
    base_config,
)
from pfml.experiments.run_key import deciding_values, digest
from pfml.experiments.tune import Study, study_for
from pfml.methods import METHODS
from pfml.models.backbone_table import default_weights
from pfml.runs.config import RunConfig
from pfml.typos import did_you_mean

__all__ = ["Plan", "PlanOptions", "PlannedRun", "plan_experiment"]

Precision = Literal["none", "bfloat16", "float16"]
#: Data set, root, backbone, weights.
Source = tuple[str, Path | None, str, str | None]


@dataclass(frozen=True)
class PlannedRun:
    """A run that an experiment consists of.

    Args:
        experiment: A key of `pfml.experiments.catalog.EXPERIMENTS`.
        dataset: As in `pfml.data.DATASETS`.
        method: A key of `pfml.methods.METHODS`.
        backbone: As in the names of the shipped configurations.
        dim: D of the embedding.
        seed: Of everything that is random.
        epochs: Passes over the training images.
        settings: What tells this run from others of the same method, such as a noise rate.
        config: All of it.
        task: What is done, a key of `pfml.experiments.tasks.TASKS`.
        needs: Keys of runs that must be done before.
        tuning: Summary of the study that its hyper-parameters come from (`tune.Study`); None without one.
    """

    experiment: str
    dataset: str
    method: str
    backbone: str
    dim: int
    seed: int
    epochs: int
    settings: dict[str, Any]
    config: RunConfig = field(repr=False)
    task: str = "train"
    needs: tuple[str, ...] = ()
    tuning: Mapping[str, Any] | None = field(default=None, repr=False)

    @cached_property
    def key(self) -> str:
        """Everything that changes the result, a dash, and what the run is for: RESULT-PURPOSE, hexadecimal.

        Runs of different experiments with the same first part have the same result, and are computed once.
        """
        return f"{self.result_key}-{digest([self.experiment, self.settings], 6)}"

    @cached_property
    def result_key(self) -> str:
        """A hash of everything that changes the result; paths, devices and the experiment's name do not."""
        # figures of a run do not change it; a time is worth nothing if it was measured beside other work
        task = "train" if self.task == "figures" else self.task
        return digest([task, self.needs, deciding_values(self.config)], 12)

    def __str__(self) -> str:
        settings = "".join(f", {name} {value}" for name, value in self.settings.items())
        tuned = ", tuned" if self.tuning is not None else ""
        return f"{self.method} on {self.dataset}, {self.backbone}, {self.dim}-d, seed {self.seed}{settings}{tuned}"


@dataclass(frozen=True)
class PlanOptions:
    """What a user may choose; None for the experiment's own.

    Args:
        datasets, methods, backbones, seeds, epochs: As the command line has them.
        roots: Data set -> folder; else the environment variable PFML_CUB etc. is asked.
        weights: Backbone -> file; else PFML_RESNET50 etc.
        device: See `TrainConfig`.
        autocast: Precision of the backbone; None for what the configurations say.
        studies: Whose values to train with, where they are for the same method, data set and backbone.
    """

    datasets: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    backbones: tuple[str, ...] | None = None
    seeds: tuple[int, ...] | None = None
    epochs: int | None = None
    roots: Mapping[str, Path] = field(default_factory=dict)
    weights: Mapping[str, Path] = field(default_factory=dict)
    device: str = "auto"
    autocast: Precision | None = None
    studies: tuple[Study, ...] = ()

    def __post_init__(self) -> None:
        for name, given, known in (
            ("data set", self.datasets or (), DATASET_BACKBONES),
            ("method", self.methods or (), METHODS),
            ("backbone", self.backbones or (), BACKBONE_DIMS),
            ("data set of --root", self.roots, DATASET_BACKBONES),
            ("backbone of --weights", self.weights, BACKBONE_DIMS),
        ):
            for one in given:
                if one not in known:
                    hint = did_you_mean(one, known)
                    raise ValueError(f"a {name} must be one of {', '.join(known)}, got {one!r}{hint}")
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs must be >= 1, got {self.epochs}")


@dataclass(frozen=True)
class Plan:
    """The runs of an experiment, the important ones of each seed together, and what was left out."""

    experiment: str
    runs: tuple[PlannedRun, ...]
    remarks: tuple[str, ...] = ()


def plan_experiment(name: str, options: PlanOptions | None = None) -> Plan:
    """The runs of the experiment `name`, all methods of one seed before the next seed.

    What cannot be run for want of images or weights is a remark, not an error.
    """
    options = options or PlanOptions()
    experiment = _experiment(name)
    sources, remarks = _sources(experiment, options)
    methods = options.methods or experiment.methods
    if experiment.is_about_training:
        idle = [method for method in methods if not METHODS[method].trains]
        remarks += [f"not run: {method} trains nothing, and {name} is about training" for method in idle]
        methods = tuple(method for method in methods if method not in idle)
    students = [method for method in methods if METHODS[method].from_teachers]
    remarks += [f"not run: {method} needs teachers: pfml train --teachers RUN RUN ..." for method in students]
    methods = tuple(method for method in methods if method not in students)
    runs: list[PlannedRun] = []
    used: dict[Path, Study] = {}
    for seed in options.seeds or experiment.seeds:
        for dataset, root, backbone, weights in sources:
            for method in methods:
                config = base_config(dataset, backbone, method)
                study = study_for(options.studies, dataset, config)
                if study is not None:
                    used[study.folder] = study
                    config = study.applied(config)
                config = replace(
                    config,
                    data=replace(config.data, root=root),
                    model=config.model if weights is None else replace(config.model, weights=weights),
                    seed=seed,
                    epochs=options.epochs or experiment.epochs or config.epochs,
                    device=options.device,
                    autocast=options.autocast or config.autocast,
                )
                runs += _planned(name, experiment.variants(config), dataset, backbone, study)
    for study in options.studies:
        if study.folder not in used:
            raise ValueError(f"no run of {name} is what the study in {study.folder} is about, {study}: leave it out")
    remarks += [f"tuned: {study}, from {folder}" for folder, study in used.items()]
    return Plan(name, tuple(runs), tuple(remarks))


def _experiment(name: str) -> Experiment:
    if name == THEORY:
        raise ValueError("theory has no runs to plan: `pfml experiment theory` and `pfml theory` check it at once")
    if name not in EXPERIMENTS:
        known = (*EXPERIMENTS, THEORY)
        raise ValueError(f"the experiment must be one of {', '.join(known)}, got {name!r}{did_you_mean(name, known)}")
    return EXPERIMENTS[name]


def _sources(experiment: Experiment, options: PlanOptions) -> tuple[list[Source], list[str]]:
    """Data sets with their roots and backbones with their weights, and why others cannot be run."""
    sources: list[Source] = []
    remarks: list[str] = []
    for dataset in options.datasets or experiment.datasets:
        root, remark = _root(dataset, options)
        if remark:
            remarks.append(remark)
            continue
        backbones = [one for one in options.backbones or experiment.backbones if one in DATASET_BACKBONES[dataset]]
        if not backbones:
            asked = ", ".join(options.backbones or experiment.backbones)
            remarks.append(f"not run: {dataset} has no configuration for {asked}")
        for backbone in backbones:
            weights, remark = _weights(dataset, backbone, options)
            if remark:
                remarks.append(remark)
            else:
                sources.append((dataset, root, backbone, weights))
    return sources, list(dict.fromkeys(remarks))


def _planned(
    experiment: str, variants: Iterable[Variant], dataset: str, backbone: str, study: Study | None
) -> list[PlannedRun]:
    runs: list[PlannedRun] = []
    for variant in variants:
        config = variant.config
        assert config.model.embedding_dim is not None
        run = PlannedRun(
            experiment,
            dataset,
            config.loss.name,
            backbone,
            config.model.embedding_dim,
            config.seed,
            config.epochs,
            variant.settings,
            config,
            variant.task,
            tuple(run.key for run in runs) if variant.needs_previous else (),
            None if study is None else study.summary,
        )
        runs.append(run)
    return runs


def _root(dataset: str, options: PlanOptions) -> tuple[Path | None, str]:
    """Where the data set lies, or why it cannot be run."""
    if dataset == "glyphs":
        return None, ""
    variable = f"PFML_{dataset.upper()}"
    root = options.roots.get(dataset) or os.environ.get(variable)
    if not root:
        return None, f"not run: no root for {dataset} (--root {dataset}=FOLDER, or {variable})"
    path = Path(root).expanduser().absolute()
    return path, "" if path.exists() else f"not run: the root of {dataset} must be a folder, got {path}"


def _weights(dataset: str, backbone: str, options: PlanOptions) -> tuple[str | None, str]:
    """The file of a backbone's weights, None for the configuration's own, or why it cannot be run."""
    variable = f"PFML_{backbone.upper()}"
    file = options.weights.get(backbone) or os.environ.get(variable)
    if file:
        path = Path(file).expanduser().absolute()
        return str(path), "" if path.is_file() else f"not run: the weights of {backbone} must be a file, got {path}"
    own = base_config(dataset, backbone, "pfml").model
    if own.weights == "default" and default_weights(own.backbone) == "file":
        return None, f"not run: no weights for {backbone} (--weights {backbone}=FILE, or {variable})"
    return None, ""
