"""A run keeps the loss that it trained."""

import json
import shutil

import pytest
import torch

from pfml.field import ContrastiveLaw, PowerLaw
from pfml.losses import PotentialFieldLoss
from pfml.methods import create_loss
from pfml.models import load_embedder
from pfml.runs.saved_loss import save_loss
from pfml.storage.files import DamagedFileError
from pfml.training import LossConfig, load_field, load_loss, train
from small_data import few_glyphs, small_config, small_embedder

FIELD = {"proxies_per_class": 2, "delta": 0.3, "alpha": 4.0}
NAMES = ("third", "first", "second")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(few_glyphs(), small_embedder(), small_config(epochs=1, loss=LossConfig("pfml", FIELD)), out=folder)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def test_the_loss_of_a_run_is_the_one_that_it_trained(run):
    in_checkpoint = _without(run, "loss")
    loss = load_loss(run)
    assert isinstance(loss, PotentialFieldLoss)
    assert not loss.training
    torch.testing.assert_close(loss.proxies, load_loss(in_checkpoint).proxies, rtol=0, atol=0)
    assert loss.field.law == PowerLaw(delta=0.3, alpha=4.0)


def test_the_loss_outlives_the_checkpoints(run):
    expected = load_loss(run)
    shutil.rmtree(run / "checkpoints")
    points = load_embedder(run).encode(list(few_glyphs().train.images[:6]))
    torch.testing.assert_close(
        load_loss(run)(points, few_glyphs().train.labels[:6]), expected(points, few_glyphs().train.labels[:6])
    )


def test_the_field_has_the_proxies_on_the_sphere_and_the_classes_in_order(run):
    field = load_field(run)
    torch.testing.assert_close(field.proxies, load_loss(run).proxy_points())
    torch.testing.assert_close(field.proxies.norm(dim=2), torch.ones(8, 2))
    assert field.class_names == few_glyphs().train.class_names
    assert field.proxy_labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    assert (field.method, field.law, field.has_own_law) == ("pfml", PowerLaw(delta=0.3, alpha=4.0), True)


def test_a_run_without_a_saved_loss_takes_its_checkpoint(run):
    interrupted = _without(run, "loss")
    torch.testing.assert_close(load_field(interrupted).proxies, load_field(run).proxies)


def test_a_run_that_was_not_trained_says_how_to_get_a_loss(run):
    for part in ("loss", "checkpoints"):
        shutil.rmtree(run / part)
    (run / "config.yaml").touch()
    with pytest.raises(FileNotFoundError, match=r"neither: it was not trained.*pfml train --config .*config\.yaml"):
        load_loss(run)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="give the folder of a run"):
        load_field(tmp_path)


@pytest.mark.parametrize(
    ("method", "options", "proxies", "law"),
    [
        ("proxy-anchor", {"scale": 16.0}, 1, PowerLaw()),
        ("soft-triple", {}, 10, PowerLaw()),
        ("proxy-gml", {}, 12, PowerLaw()),
        ("hist", {}, 1, PowerLaw()),
        ("contrastive", {}, 0, PowerLaw()),
        ("margin", {}, 0, PowerLaw()),
        ("cpml", {"delta": 0.4}, 15, ContrastiveLaw(delta=0.4)),
    ],
)
def test_proxies_of_every_kind_of_loss_can_be_read(tmp_path, method, options, proxies, law):
    torch.manual_seed(0)
    config = LossConfig(method, options)
    loss = create_loss(config, 3, 4)
    save_loss(tmp_path / "loss", loss, config, NAMES, 4)
    field = load_field(tmp_path)
    assert field.proxies.shape == (3, proxies, 4)
    assert (field.law, field.has_own_law, field.class_names) == (law, method == "cpml", NAMES)
    if proxies:
        torch.testing.assert_close(field.proxies, loss.proxy_points())
    stored = load_loss(tmp_path).state_dict()
    for name, value in loss.state_dict().items():
        torch.testing.assert_close(stored[name], value)


def test_a_changed_option_is_noticed(run):
    path = run / "loss" / "loss.json"
    manifest = json.loads(path.read_text())
    manifest["options"]["alpha"] = 2.0
    path.write_text(json.dumps(manifest))
    with pytest.raises(DamagedFileError, match="does not match its own checksum"):
        load_field(run)


def test_changed_proxies_are_noticed(run):
    (file,) = (run / "loss").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedFileError, match="sha256"):
        load_loss(run)


def _without(run, part):
    other = shutil.copytree(run, run.parent / "other")
    shutil.rmtree(other / part)
    return other


def test_a_description_of_more_than_is_stored_is_refused_before_it_takes_the_memory(tmp_path):
    config = LossConfig("pfml", {"proxies_per_class": 2})
    loss = create_loss(config, 3, 4)
    for options, dim in (({"proxies_per_class": 10**9}, 4), ({"proxies_per_class": 2}, 10**12)):
        save_loss(tmp_path / "loss", loss, LossConfig("pfml", options), ("a", "b", "c"), dim)
        with pytest.raises(DamagedFileError, match="must hold what it describes"):
            load_loss(tmp_path)
    save_loss(tmp_path / "loss", create_loss(LossConfig("hist"), 3, 4), LossConfig("hist"), ("a", "b", "c"), 4)
    assert load_loss(tmp_path) is not None
