"""A run that continues another one with further images: `pfml train --from RUN --data MORE`.

The oracle: proxies by class name, those of the run for its classes, the centers of k-means for the others.
"""

import csv
import shutil
from dataclasses import replace

import pytest
import torch

from pfml.cli import main, parsed_values
from pfml.evaluation import embed
from pfml.losses.proxy_init import class_proxies
from pfml.methods import create_loss
from pfml.models import load_embedder
from pfml.models.embedder import learned_by
from pfml.runs.checkpoint import load_checkpoint
from pfml.runs.config_files import read_config, write_config
from pfml.runs.data import prepare_data
from pfml.runs.folder import RunFolder
from pfml.runs.saved_loss import load_loss_of_classes
from pfml.search import ModelIdentity
from pfml.sphere import unit
from pfml.training import DataConfig, LossConfig, run
from pfml.training.progress import Monitor
from pfml.training.start import continued_config, learned_proxies
from plain_pages import without_plots
from small_data import InterruptAt
from small_photos import as_if_trained, config_for, draw, failure

pytestmark = pytest.mark.usefixtures("_without_plots")

PROXY_LOSSES = {
    "pfml": {"proxies_per_class": 2},
    "pfml-log": {"proxies_per_class": 2, "proxy_init": "kmeans"},
    "proxy-anchor": {},
    "proxy-nca": {},
    "soft-triple": {},
    "proxy-gml": {},
}


class Remarks(Monitor):
    """What is said."""

    def __init__(self):
        self.said = []

    def remark(self, text):
        self.said.append(text)


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    return draw(tmp_path_factory.mktemp("more"), {"n0": 8, "n1": 8, "c0": 4})


@pytest.fixture(scope="module")
def continued(trained, more, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "more birds"
    with without_plots():
        main(["train", "--from", str(trained), "--data", str(more), "--out", str(out), "--quiet"])
    return out


def test_settings_are_those_of_the_run_and_typed_ones_override_them(trained, more):
    config = parsed_values("train", ["--from", str(trained), "--data", str(more), "--epochs", "5"])["config"]
    stored = read_config(trained / "config.yaml")
    expected = replace(stored, epochs=5, start=trained, data=replace(stored.data, added=(str(more),)))
    assert config == expected
    assert parsed_values("train", ["--from", str(trained), "--data", str(more)])["given"] is None


def test_printing_writes_nothing_and_is_a_configuration_of_the_same_run(
    trained, more, continued, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    before = sorted(trained.rglob("*"))
    main(["train", "--from", str(trained), "--data", str(more), "--print_config"])
    assert sorted(trained.rglob("*")) == before
    assert not list(tmp_path.iterdir())
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert read_config(tmp_path / "printed.yaml") == read_config(continued / "config.yaml")


def test_the_run_has_old_and_new_images(photos, more, continued):
    config = read_config(continued / "config.yaml")
    assert config.data.name == str(photos)
    assert config.data.added == (str(more),)
    data = prepare_data(config.data).data
    assert learned_by(continued).class_names == data.train.class_names
    assert len(data.train) + len(data.test) == 96 + 20
    assert RunFolder(continued).read_results()["last"]["test"]["num_queries"] == len(data.test)


@pytest.mark.parametrize("method", PROXY_LOSSES)
def test_old_proxies_are_kept_and_new_ones_start_at_the_centers_of_their_class(photos, more, tmp_path, method):
    loss = LossConfig(method, PROXY_LOSSES[method])
    run(config_for(photos, loss=loss, epochs=1), tmp_path / "run")
    config = continued_config(tmp_path / "run", more)
    config = replace(config, optimizer=replace(config.optimizer, proxy_lr=1e-9))  # a step moves no proxy
    remarks = Remarks()
    remarks.step = InterruptAt(1).step
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "next", monitor=remarks)
    assert any("embedder and proxies start as those of" in text for text in remarks.said)
    (before, names), (after, every) = (load_loss_of_classes(tmp_path / each) for each in ("run", "next"))
    known, proxies = learned_proxies(before).detach(), learned_proxies(after).detach()
    torch.testing.assert_close(proxies[[every.index(name) for name in names]], known, rtol=0, atol=1e-6)
    train = prepare_data(config.data).data.train
    points = embed(load_embedder(tmp_path / "run"), train)
    new = [c for c, name in enumerate(every) if name not in names]
    assert len(new) == 1
    for c in new:
        own = points[train.labels == c]
        centers = class_proxies("kmeans", own, proxies.shape[1], generator=torch.Generator().manual_seed(0))
        misfits = [torch.cdist(own, unit(each)).min(dim=1).values.square().sum() for each in (proxies[c], centers)]
        assert misfits[0] <= 1.5 * misfits[1] + 1e-6
        length = learned_proxies(create_loss(loss, len(every), 8)).detach().norm(dim=2)
        assert length.min() * 0.7 <= proxies[c].norm(dim=1).mean() <= length.max() * 1.3


def test_the_first_checkpoint_is_the_start(trained, more, tmp_path):
    config = continued_config(trained, more)

    class Stop(Monitor):
        def start(self, *_):
            raise RuntimeError("before the first step")

    with pytest.raises(RuntimeError, match="before the first step"):
        run(config, tmp_path / "early", monitor=Stop())
    assert not (tmp_path / "early" / "checkpoints" / "last.json").is_file()
    with pytest.raises(KeyboardInterrupt):
        run(replace(config, warm_up_epochs=2), tmp_path / "run", monitor=InterruptAt(1))
    tensors, values = load_checkpoint(tmp_path / "run" / "checkpoints")
    assert values["step"] == 1
    backbone = {name: value for name, value in load_embedder(trained).state_dict().items() if "backbone" in name}
    weights = [name for name in backbone if name.endswith("weight")]
    assert weights
    for name in weights:  # which a warm-up leaves as they are
        assert torch.equal(tensors[f"embedder/{name}"], backbone[name])


def test_it_is_resumed_to_the_same_bits_without_the_run_that_it_continues(trained, more, continued, tmp_path):
    copy = tmp_path / "birds"
    shutil.copytree(trained, copy)
    config = continued_config(copy, more)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", monitor=InterruptAt(2))
    shutil.rmtree(copy)
    main(["train", "--resume", str(tmp_path / "run"), "--quiet"])
    assert ModelIdentity.of(load_embedder(tmp_path / "run")) == ModelIdentity.of(load_embedder(continued))
    assert learned_by(tmp_path / "run") == learned_by(continued)


def test_a_run_without_a_checkpoint_needs_the_run_that_it_continues(trained, more, tmp_path):
    config = replace(continued_config(trained, more), start=tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"the run to start from must have a model, but .*gone has none"):
        run(config, tmp_path / "run")


@pytest.mark.parametrize(("method", "said"), [("triplet", "what triplet learns"), ("hist", "what hist learns")])
def test_what_other_losses_learn_starts_again_and_that_is_said(photos, more, tmp_path, method, said):
    run(config_for(photos, loss=LossConfig(method), epochs=1), tmp_path / "run")
    remarks = Remarks()
    run(continued_config(tmp_path / "run", more), tmp_path / "next", monitor=remarks)
    assert any(said in text for text in remarks.said)


def test_proxies_of_another_number_start_again(trained, more, tmp_path, capsys):
    options = ["--loss.options.proxies_per_class", "3", "--epochs", "1", "--out", str(tmp_path / "run")]
    main(["train", "--from", str(trained), "--data", str(more), *options])
    assert "its proxies do not fit and start again" in capsys.readouterr().out


def test_it_can_be_repeated(continued, tmp_path):
    third = draw(tmp_path / "third", {"x": 6, "y": 6})
    out = ("--epochs", "1", "--out", str(tmp_path / "run"), "--quiet")
    main(["train", "--from", str(continued), "--data", str(third), *out])
    config = read_config(tmp_path / "run" / "config.yaml")
    assert config.data.added == (*read_config(continued / "config.yaml").data.added, str(third))
    assert set(learned_by(tmp_path / "run").class_names) > set(learned_by(continued).class_names)


def test_a_run_whose_model_sees_larger_crops_is_continued_with_those_of_its_training(photos, more, tmp_path):
    run(config_for(photos, epochs=1, test_image_size=24), tmp_path / "run")
    config = continued_config(tmp_path / "run", more)
    plain = replace(config, test_image_size=None)
    run(config, tmp_path / "next")
    run(plain, tmp_path / "plain")
    ours, theirs = (load_embedder(tmp_path / name) for name in ("next", "plain"))
    assert (ours.preprocessing.crop, theirs.preprocessing.crop) == (24, 16)
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())


def test_its_final_model_starts_from_the_same_run(continued, trained):
    main(["train", "--final", str(continued), "--quiet"])
    config = read_config(continued / "final" / "config.yaml")
    assert config.start == trained
    assert len(learned_by(continued / "final").class_names) == 10


def test_corrections_apply_to_the_same_images_beside_new_ones(photos, more, tmp_path):
    train = prepare_data(DataConfig(str(photos))).data.train
    first, second = train.class_names[:2]
    with (tmp_path / "list.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerows([("image", "given class", "corrected class"), (f"{first}/0.png", first, second)])
    run(config_for(photos, data=DataConfig(str(photos), corrections=tmp_path / "list.csv"), epochs=1), tmp_path / "run")
    main(["train", "--from", str(tmp_path / "run"), "--data", str(more), "--out", str(tmp_path / "next"), "--quiet"])
    train = prepare_data(read_config(tmp_path / "next" / "config.yaml").data).data.train
    labels = {train.name_of(k): train.class_names[label] for k, label in enumerate(train.labels.tolist())}
    assert labels[str(photos / first / "0.png")] == second
    assert labels[str(photos / first / "1.png")] == first


def test_bad_input_gets_a_sentence(trained, photos, more, tmp_path):
    base = ("train", "--from", trained)
    assert "needs the images to add: --data FOLDER" in failure(*base)
    assert "are images of" in failure(*base, "--data", photos)
    assert "must be a folder of class folders or a .csv file" in failure(*base, "--data", tmp_path / "missing")
    assert "must have a folder with images per class" in failure(*base, "--data", tmp_path)
    assert "leave out --data.split" in failure(*base, "--data", more, "--data.split", "none")
    assert "leave out --model" in failure(*base, "--data", more, "--model.pooling", "max")
    assert "leave out --config and --recipe" in failure(*base, "--data", more, "--config", "glyphs")
    assert "leave out --ensemble, --resume and --final" in failure(*base, "--data", more, "--final", trained)
    assert "with config.yaml in it" in failure("train", "--from", tmp_path, "--data", more)
    write_config(tmp_path / "config.yaml", read_config(trained / "config.yaml"), sealed=True)
    assert "has not ended: finish it first" in failure("train", "--from", tmp_path, "--data", more)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": DataConfig("glyphs")}, "glyphs is a published data set"),
        ({"loss": LossConfig("relaxed-contrastive"), "teachers": ("a",)}, "is the student of teachers"),
        ({"loss": LossConfig("zero-shot")}, "has trained nothing"),
    ],
)
def test_runs_that_cannot_be_continued_are_refused_in_one_sentence(trained, more, tmp_path, change, message):
    as_if_trained(tmp_path, trained, config_for("photos", **change))
    assert message in failure("train", "--from", tmp_path, "--data", more)


def test_classes_that_are_gone_are_named(photos, trained, more, tmp_path):
    fewer = tmp_path / "photos"
    shutil.copytree(photos, fewer)
    run(config_for(fewer, epochs=1), tmp_path / "run")
    lost = prepare_data(DataConfig(str(fewer))).data.train.class_names[0]
    shutil.rmtree(fewer / lost)
    error = failure("train", "--from", tmp_path / "run", "--data", more, "--out", tmp_path / "next")
    assert lost in error or "also trained on" in error


def test_a_run_that_worked_up_the_ladder_does_so_again_with_all_images(trained, photos, more, tmp_path):
    ladder = replace(read_config(trained / "config.yaml"), effort="seconds", loss=LossConfig("zero-shot"))
    ladder = replace(ladder, model=replace(ladder.model, pooling="max"))
    as_if_trained(tmp_path, trained, ladder)
    config = parsed_values("train", ["--from", str(tmp_path), "--data", str(more)])["config"]
    assert (config.effort, config.start, config.data.added) == ("seconds", None, (str(more),))
    assert config.model.pooling == "avg"
    assert "leave out --epochs" in failure("train", "--from", tmp_path, "--data", more, "--epochs", "3")
