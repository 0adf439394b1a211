"""Choosing hyper-parameters on what is neither trained on nor tested on (`pfml tune`, by Optuna).

The training classes, or with data.split images the training images, are split once more: a trial trains on one part and
is scored on the other. The test images are not in the data that a trial sees, so that no choice can depend on them.
`pfml experiment --tuned` reads a study back.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfml.data import RetrievalData
from pfml.data.splits import for_choices
from pfml.experiments.run_key import stable_config
from pfml.models import Embedder
from pfml.packages import pip_install
from pfml.runs.config import RunConfig
from pfml.runs.config_files import plain, write_config
from pfml.runs.data import load_checked, prepare_data
from pfml.storage.files import write_atomically
from pfml.training.environment import seeded
from pfml.training.progress import Monitor
from pfml.training.runner import train
from pfml.training.setup import create_batches, require_matches
from pfml.training.shutdown import Interrupted
from pfml.typos import did_you_mean

if TYPE_CHECKING:
    import optuna

__all__ = [
    "SPACES",
    "Range",
    "Study",
    "Tuned",
    "read_study",
    "space_of",
    "study_for",
    "tune",
    "tuning_data",
    "with_value",
]

#: All trials of a study, written after each of them.
FILE = "tuning.json"
VERSION = 1


@dataclass(frozen=True)
class Range:
    """Where to look for a value.

    Args:
        low, high: Both included.
        log: Whether ratios count, not differences.
        whole: Whether the value is an integer.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high or not math.isfinite(self.high - self.low):
            raise ValueError(f"a range must go from a lower to a higher number, got {self.low:g} to {self.high:g}")
        if self.log and not self.low > 0:
            raise ValueError(f"a range on a log scale must be positive, got {self.low:g} to {self.high:g}")

    @classmethod
    def parse(cls, text: str) -> Range:
        """LOW:HIGH, with the prefix log: for ratios and int: for whole numbers, as in log:1e-5:1e-3."""
        try:
            *prefixes, low, high = text.split(":")
            if not set(prefixes) <= {"log", "int"}:
                raise ValueError(f"unknown prefix {prefixes[0]!r}")
            return cls(float(low), float(high), log="log" in prefixes, whole="int" in prefixes)
        except ValueError as error:
            raise ValueError(f"a range must be LOW:HIGH, log:LOW:HIGH or int:LOW:HIGH, got {text!r}: {error}") from None

    def __str__(self) -> str:
        prefixes = "log:" * self.log + "int:" * self.whole
        return f"{prefixes}{self.low:.6g}:{self.high:.6g}"

    def suggest(self, trial: optuna.Trial, name: str) -> float:
        """A value for this trial."""
        if self.whole:
            return trial.suggest_int(name, round(self.low), round(self.high), log=self.log)
        return trial.suggest_float(name, self.low, self.high, log=self.log)


_RATES = {"optimizer.lr": Range(0.3, 3.0, log=True), "optimizer.proxy_lr": Range(0.3, 3.0, log=True)}
_FIELD = {"loss.options.delta": Range(0.1, 1.2), "loss.options.alpha": Range(1.0, 12.0)}
#: Method -> what is tuned if nothing else is said; ranges of learning rates are multiples of the configuration's.
SPACES: dict[str, dict[str, Range]] = {
    "pfml": {**_RATES, **_FIELD},
    "pfml-log": {**_RATES, **_FIELD, "loss.options.delta_rep": Range(0.3, 1.5)},
    "pfml-robust": {
        **_RATES,
        "loss.options.delta": Range(0.9, 1.2),  # steep fields of smaller radii are beyond float32
        "loss.options.delta_rep": Range(1.0, 1.8),
        "loss.options.alpha": Range(6.0, 32.0, log=True),
        "loss.options.trust": Range(0.0, 1.0),
    },
    "cpml": {**_RATES, "loss.options.delta": Range(0.1, 1.2)},
}


def space_of(config: RunConfig) -> dict[str, Range]:
    """What to tune for the method of `config`: learning rates, and the shape of the field where there is one."""
    lr = config.optimizer.lr
    rates = {"optimizer.lr": lr, "optimizer.proxy_lr": config.optimizer.proxy_lr or 100 * lr}
    space = SPACES.get(config.loss.name, _RATES)
    return {
        name: replace(each, low=each.low * rates[name], high=each.high * rates[name]) if name in rates else each
        for name, each in space.items()
    }


def with_value(config: Any, path: str, value: Any) -> Any:
    """`config` with one value changed; `path` is what the option is called, such as optimizer.lr."""
    first, _, rest = path.partition(".")
    if isinstance(config, dict):
        return {**config, first: with_value(config.get(first, {}), rest, value) if rest else value}
    names = [one.name for one in dataclasses.fields(config)]
    if first not in names:
        raise ValueError(f"there is no option {first!r} to tune{did_you_mean(first, names)}")
    inner = getattr(config, first)
    if rest and not (dataclasses.is_dataclass(inner) or isinstance(inner, dict)):
        raise ValueError(f"the option {first!r} has no {rest!r} in it to tune")
    if not rest and dataclasses.is_dataclass(inner):
        raise ValueError(f"{first!r} is a group of options: say which one to tune")
    return replace(config, **{first: with_value(inner, rest, value) if rest else value})


def _with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    for name, value in values.items():
        config = with_value(config, name, value)
    return config


def tuning_data(config: RunConfig, split: str, loaded: RetrievalData | None = None) -> RetrievalData:
    """Data whose "test" images are taken from those that train; the true test images are left out altogether.

    They are of classes of their own. With data.split images they are of the training classes.
    """
    loaded = load_checked(config.data) if loaded is None else loaded
    has_own = loaded.validation is not None or loaded.protocol != "classes"
    data, _ = prepare_data(replace(config.data, validation="none" if has_own else split), loaded=loaded)
    return for_choices(data, split)


@dataclass(frozen=True)
class Tuned:
    """The outcome: the best values, their score on the validation classes, and the configuration with them."""

    values: dict[str, float]
    score: float
    config: RunConfig
    trials: list[dict[str, Any]]


def tune(
    config: RunConfig,
    out: Path,
    *,
    trials: int = 20,
    space: Mapping[str, Range] | None = None,
    split: str = "half",
    monitor: Monitor | None = None,
    on_trial: Callable[[dict[str, Any]], None] = lambda trial: None,
    loaded: RetrievalData | None = None,
) -> Tuned:
    """Search for the values in `space` with the best `config.select_by` on validation classes.

    Poor trials are ended early. Everything is in the folder `out`: the study, which a second call resumes,
    tuning.json with all trials, and best.yaml for `pfml train --config`.

    Args:
        config: What a trial trains, but for the values in question.
        out: Folder of the study.
        trials: How many trials there are to be in all, those of earlier calls included.
        space: Option -> where to look; `space_of(config)` if None.
        split: How the training classes are divided, see `pfml.data.splits.for_choices`.
        monitor: What to show of each trial.
        on_trial: Called with the record of each finished trial.
        loaded: What `pfml.runs.data.load_checked` returned for these images, from a caller that has it already.
    """
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        raise ImportError(f"tuning needs the package optuna: {pip_install('tune')}") from None

    if trials < 1:
        raise ValueError(f"trials must be at least 1, got {trials}")
    space = dict(space_of(config) if space is None else space)
    if not space:
        raise ValueError("there must be at least one value to tune")
    for name, each in space.items():
        with_value(config, name, round(each.low) if each.whole else each.low)
    data = tuning_data(config, split, loaded)
    split = "images" if data.protocol == "images" else split
    create_batches(data.train, config)  # what fails for every trial fails before the first
    require_matches(data)
    out.mkdir(parents=True, exist_ok=True)
    # at WARNING it prints the traceback of every trial that failed or was stopped; we say both in a line of our own
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        study_name=_name_of_study(config, space, split),
        storage=JournalStorage(JournalFileBackend(str(out / "study.log"))),
        load_if_exists=True,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=config.seed, n_startup_trials=min(8, trials)),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=max(config.epochs // 8, 1), reduction_factor=3),
    )

    def objective(trial: optuna.Trial) -> float:
        values = {name: each.suggest(trial, name) for name, each in space.items()}
        folder = out / f"trial-{trial.number}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            chosen = _with_values(config, values)
            with seeded(chosen.seed):
                embedder = Embedder(chosen.model)
            watch = _Pruning(trial, chosen.select_by, monitor or Monitor())
            results = train(data, embedder, chosen, out=folder, storage=chosen.storage, monitor=watch)
        except Interrupted:
            trial.set_user_attr("interrupted", True)
            raise
        except (ValueError, RuntimeError) as error:  # values that do not go together, or a loss that is not finite
            trial.set_user_attr("error", str(error)[:500])
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return float(results["last"]["test"][chosen.select_by])

    def finished(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        _write_record(out, config, space, split, study)
        on_trial(_record(trial))

    # a trial that was interrupted says nothing about its values, and does not count
    done = sum(trial.state.is_finished() and "interrupted" not in trial.user_attrs for trial in study.trials)
    if done < trials:
        study.optimize(objective, n_trials=trials - done, callbacks=[finished], catch=(ValueError, RuntimeError))
    complete = [trial for trial in study.trials if trial.state == optuna.trial.TrialState.COMPLETE]
    if not complete:
        errors = [trial.user_attrs["error"] for trial in study.trials if "error" in trial.user_attrs]
        raise ValueError(f"no trial came to an end; the first error: {errors[0] if errors else 'unknown'}")
    best = max(complete, key=lambda trial: trial.value or -math.inf)
    chosen = _with_values(config, best.params)
    write_config(out / "best.yaml", chosen)
    return Tuned(dict(best.params), float(best.value or 0.0), chosen, [_record(trial) for trial in study.trials])


class _Pruning(Monitor):
    """Reports the scores of a trial to the study, and ends the trial if the others did better."""

    def __init__(self, trial: optuna.Trial, metric: str, shown: Monitor) -> None:
        self.trial, self.metric, self.shown = trial, metric, shown

    def evaluated(self, entry: dict[str, Any]) -> None:
        import optuna

        self.shown.evaluated(entry)
        self.trial.report(entry["test"][self.metric], step=entry["epoch"])
        if self.trial.should_prune():
            raise optuna.TrialPruned

    def start(self, epochs: int, steps_per_epoch: int, steps_done: int) -> None:
        self.shown.start(epochs, steps_per_epoch, steps_done)

    def step(self, epoch: int, loss: float, images_per_second: float) -> None:
        self.shown.step(epoch, loss, images_per_second)

    def stop(self) -> None:
        self.shown.stop()


def _name_of_study(config: RunConfig, space: Mapping[str, Range], split: str) -> str:
    """A study is about one question: another configuration, space or split is another study in the same file."""
    asked = {
        "config": stable_config(config),
        "space": {k: dataclasses.asdict(v) for k, v in space.items()},
        "split": split,
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def _record(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    """One trial as plain values."""
    last = max(trial.intermediate_values, default=None)
    score = trial.value if trial.value is not None else trial.intermediate_values.get(last) if last else None
    return {
        "number": trial.number,
        "state": trial.state.name.lower(),
        "values": dict(trial.params),
        "score": score,
        "epoch": last,
        "error": trial.user_attrs.get("error"),
    }


def _write_record(out: Path, config: RunConfig, space: Mapping[str, Range], split: str, study: optuna.Study) -> None:
    record = {
        "version": VERSION,
        "metric": config.select_by,
        "split": split,
        "space": {name: dataclasses.asdict(each) for name, each in space.items()},
        "config": plain(config),
        "trials": [_record(trial) for trial in study.trials],
    }
    write_atomically(out / FILE, json.dumps(record, indent=1).encode())


@dataclass(frozen=True)
class Study:
    """What a study found, for the runs of an experiment.

    Args:
        folder: Where it lies.
        method, dataset, backbone: What it trained; its values are for runs with the same.
        values: Option -> the best value, judged on validation classes.
        summary: What a record says of it: metric, split, space, epochs, trials, score, values, and the file's checksum.
    """

    folder: Path
    method: str
    dataset: str
    backbone: str
    values: Mapping[str, Any]
    summary: Mapping[str, Any]

    def fits(self, dataset: str, config: RunConfig) -> bool:
        """Whether its values are for a run of `config` on `dataset`."""
        return (self.method, self.dataset, self.backbone) == (config.loss.name, dataset, config.model.backbone)

    def applied(self, config: RunConfig) -> RunConfig:
        """`config` with the best values."""
        for name, value in self.values.items():
            config = with_value(config, name, value)
        return config

    def __str__(self) -> str:
        values = ", ".join(f"{name} {value:.4g}" for name, value in self.values.items())
        score = f"{self.summary['metric']} {100 * self.summary['score']:.2f}"
        how = f"{self.summary['trials']} trials, split {self.summary['split']}, {score} on validation classes"
        return f"{self.method} on {self.dataset}, {self.backbone}: {values} ({how})"


def read_study(folder: Path) -> Study:
    """The study in `folder`, which `pfml tune --out` has written.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It cannot be read, or none of its trials has come to an end.
    """
    file = folder / FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} must be the folder of a study (pfml tune --out), but it has no {FILE}")
    content = file.read_bytes()
    try:
        record = json.loads(content)
        version, config = record["version"], record["config"]
        trials = [(one["state"], one["score"], dict(one["values"])) for one in record["trials"]]
        complete = [(float(score), values) for state, score, values in trials if state == "complete"]
        about = (str(config["loss"]["name"]), str(config["data"]["name"]), str(config["model"]["backbone"]))
        told = {name: record[name] for name in ("metric", "split", "space")} | {"epochs": config["epochs"]}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} must be what pfml tune writes, but it cannot be read: {error!r}") from None
    if version != VERSION:
        raise ValueError(f"{file} must have version {VERSION}, got {version!r}: read it with the pfml that wrote it")
    if not complete:
        raise ValueError(
            f"{file} must have a trial that came to an end, got none of {len(trials)}: resume it with pfml tune"
        )
    score, values = max(complete, key=lambda one: one[0])
    if set(values) != set(told["space"]):
        raise ValueError(f"{file} must have a value for each of {', '.join(told['space'])}, got {', '.join(values)}")
    counts = {"trials": len(trials), "complete": len(complete)}
    summary = {
        "study": folder.absolute().name,
        "sha256": hashlib.sha256(content).hexdigest(),
        **told,
        **counts,
        "score": score,
        "values": values,
    }
    return Study(folder, *about, values, summary)


def study_for(studies: Sequence[Study], dataset: str, config: RunConfig) -> Study | None:
    """The one whose values are for a run of `config` on `dataset`, if there is one."""
    fitting = [study for study in studies if study.fits(dataset, config)]
    if len(fitting) > 1:
        folders = ", ".join(str(study.folder) for study in fitting)
        raise ValueError(
            f"there must be one study at most of {config.loss.name} on {dataset}, {config.model.backbone}, "
            f"got {folders}"
        )
    return fitting[0] if fitting else None
