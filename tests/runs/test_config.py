import dataclasses

import pytest
import torch
import yaml

from pfml.data import LabelNoise
from pfml.evaluation import retrieval_metrics
from pfml.evaluation.metrics import shown_metrics
from pfml.runs.config_files import plain, read_config, shipped_config, shipped_configs, write_config
from pfml.training import (
    BatchConfig,
    DataConfig,
    LossConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    StorageConfig,
    TrainConfig,
)


def test_defaults_are_the_values_of_the_paper_s_supplement():
    config = RunConfig()
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.weight_decay) == ("adam", 1e-4, 5e-4)
    assert (config.epochs, config.warm_up_epochs, config.batch_norm) == (200, 1, "freeze")
    assert (config.batch.size, config.loss.name, config.model.backbone) == (100, "pfml", "resnet50")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BatchConfig(size=0), "batch.size"),
        (lambda: BatchConfig(size=10, samples_per_class=4), "multiple"),
        (lambda: OptimizerConfig(lr=0.0), "optimizer.lr must be positive, got 0.0"),
        (lambda: OptimizerConfig(proxy_lr=-1.0), "optimizer.proxy_lr"),
        (lambda: OptimizerConfig(weight_decay=-1.0), "optimizer.weight_decay"),
        (lambda: TrainConfig(epochs=0), "epochs must be >= 1, got 0"),
        (lambda: TrainConfig(checkpoint_every=-1), "checkpoint_every"),
        (lambda: TrainConfig(log_every=0), "log_every"),
        (lambda: TrainConfig(seed=2**70), "seed"),
        (lambda: TrainConfig(select_by="map_at_k"), "select_by must be .* got 'map_at_k'; did you mean 'map_at_r'"),
    ],
)
def test_values_without_a_meaning_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_validation_may_choose_by_every_metric_of_an_evaluation(tmp_path):
    """The names come from the table of metrics, also for the parser of files."""
    points, labels = torch.nn.functional.normalize(torch.randn(6, 3), dim=1), torch.tensor([0, 0, 1, 1, 2, 2])
    computed = shown_metrics(retrieval_metrics(points, labels, recall_at=(1,)).as_dict())
    for name in computed:
        write_config(tmp_path / "config.yaml", RunConfig(select_by=name))
        assert read_config(tmp_path / "config.yaml").select_by == name


def test_a_written_configuration_reads_back_equal(tmp_path):
    config = RunConfig(
        epochs=3,
        loss=LossConfig("pfml-log", {"delta": 0.5}),
        batch=BatchConfig(20, 0),
        schedule=ScheduleConfig("step", every=3),
        data=DataConfig("csv", tmp_path / "a.csv", "half", LabelNoise(0.2, seed=3)),
        storage=StorageConfig(short_side=256, cache=tmp_path),
    )
    write_config(tmp_path / "config.yaml", config)
    assert read_config(tmp_path / "config.yaml") == config


def test_a_mistyped_key_in_a_file_is_named(tmp_path):
    values = plain(RunConfig())
    values["optimizer"]["learning_rate"] = 1e-3
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ValueError, match="learning_rate"):
        read_config(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    "content", ["[1, 2]", "epochs: [", "epochs: many", "", "epochs: 3", "!!python/object/apply:os.getcwd []"]
)
def test_a_file_that_is_no_configuration_is_refused_by_name(tmp_path, content):
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match="config.yaml"):
        read_config(path)


def test_a_missing_file_is_said_in_words(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_config(tmp_path / "config.yaml")


def test_every_data_set_and_backbone_of_the_paper_has_a_configuration():
    networks = ("resnet50-512", "resnet50-64", "bn_inception-512", "vit_small-384", "dino_small-384")
    expected = {f"{data}-{network}" for data in ("cub", "cars", "sop") for network in networks}
    assert expected <= set(shipped_configs())


@pytest.mark.parametrize("name", shipped_configs())
def test_every_shipped_configuration_can_be_read(name):
    dims = {"glyphs": 64}.get(name) or int(name.split("-")[-1] if name[-1].isdigit() else 512)
    assert shipped_config(name).model.embedding_dim == dims


@pytest.mark.parametrize(
    ("name", "weight_decay", "size", "proxies", "warm_up", "batch_norm"),
    [
        ("cub-resnet50-512", 5e-4, 100, 15, 1, "freeze"),
        ("cub-bn_inception-512", 5e-4, 180, 15, 1, "freeze"),
        ("cars-resnet50-512", 1e-4, 100, 15, 1, "freeze"),
        ("cars-bn_inception-512", 1e-4, 180, 15, 1, "freeze"),
        ("sop-resnet50-512", 5e-4, 100, 2, 0, "train"),
        ("sop-bn_inception-512", 5e-4, 180, 2, 0, "train"),
    ],
)
def test_shipped_configurations_have_the_values_of_the_paper_s_table(
    name, weight_decay, size, proxies, warm_up, batch_norm
):
    config = shipped_config(name)
    assert dataclasses.astuple(config.optimizer)[:2] == ("adam", 1e-4)
    assert (config.optimizer.weight_decay, config.optimizer.proxy_lr) == (weight_decay, 0.01)
    assert (config.batch.size, config.epochs) == (size, 200)
    assert config.loss.options == {"proxies_per_class": proxies, "delta": 0.2, "alpha": 3.0}
    assert (config.warm_up_epochs, config.batch_norm) == (warm_up, batch_norm)


def test_an_unknown_shipped_configuration_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean 'glyphs'"):
        shipped_config("glyph")
