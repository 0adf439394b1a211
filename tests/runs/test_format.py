"""A run of format version 1 lies in `format_1` and must load, whatever changes later.

`write_run` has written it, without the model (`tests/models` has one of its own) and TensorBoard's curves.
"""

import shutil
from pathlib import Path

import torch

from pfml.data import ImageSet, RetrievalData
from pfml.models import EmbedderConfig, load_embedder
from pfml.runs.checkpoint import load_checkpoint
from pfml.runs.config_files import read_config
from pfml.runs.data import PreparedData
from pfml.runs.final import Validated, read_validated
from pfml.runs.folder import RunFolder
from pfml.training import BatchConfig, LossConfig, OptimizerConfig, RunConfig, load_field, load_loss, run
from pfml.training.final import Final

FORMAT_1 = Path(__file__).parent / "format_1"


def random_images():
    """Eight classes of four images of noise, four of them to train on."""
    pixels = torch.randint(0, 256, (32, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels, names = torch.arange(4).repeat_interleave(4), [f"class {number}" for number in range(8)]
    train, test = (ImageSet(pixels[k : k + 16], labels, tuple(names[k // 4 : k // 4 + 4])) for k in (0, 16))
    return PreparedData(RetrievalData("noise", train, test))


def write_run(out):
    config = RunConfig(
        model=EmbedderConfig("convnet", embedding_dim=4),
        loss=LossConfig("pfml", {"proxies_per_class": 2}),
        batch=BatchConfig(8, 4),
        optimizer=OptimizerConfig("sgd", lr=1e-9),
        epochs=2,
        warm_up_epochs=0,
        device="cpu",
        log_every=1,
    )
    run(config, out, data=random_images())
    write_figures(out)
    shutil.rmtree(out / "model")
    shutil.rmtree(out / "tensorboard", ignore_errors=True)


def write_figures(run_folder):
    """What a final model of the run begins with."""
    figures = Validated.of(RunFolder(run_folder), classes=4, steps=4)
    Final(read_config(run_folder / "config.yaml"), run_folder / "final", validated=figures).begin()


def test_the_figures_of_a_final_model_are_read():
    scores = RunFolder(FORMAT_1).read_results()["last"]["test"]
    assert read_validated(FORMAT_1 / "final") == Validated("format_1", "classes", 2, "last", 4, 4, scores)


def test_configuration_results_log_and_loss_are_read():
    config, folder = read_config(FORMAT_1 / "config.yaml"), RunFolder(FORMAT_1)
    assert (config.loss, config.epochs) == (LossConfig("pfml", {"proxies_per_class": 2}), 2)
    assert folder.read_results()["last"]["epoch"] == 2
    assert len(folder.entries("step")) == 4
    assert [entry["epoch"] for entry in folder.entries("evaluation")] == [1, 2]
    field = load_field(FORMAT_1)
    assert field.proxies.shape == (4, 2, 4)
    assert field.class_names == ("class 0", "class 1", "class 2", "class 3")
    assert torch.equal(load_loss(FORMAT_1).proxy_points(), field.proxies)


def test_it_is_resumed(tmp_path):
    folder = shutil.copytree(FORMAT_1, tmp_path / "run")
    results = run(read_config(folder / "config.yaml"), folder, data=random_images(), resume=True)
    assert results["last"] == RunFolder(FORMAT_1).read_results()["last"]
    stored, embedder = load_checkpoint(FORMAT_1 / "checkpoints")[0], load_embedder(folder)
    for name, value in embedder.state_dict().items():
        assert torch.equal(value, stored[f"embedder/{name}"])
