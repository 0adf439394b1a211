"""Training with a network, a loss and images of one's own, in Python and by the command."""

import json
import sys

import pytest
import torch
from PIL import Image
from torch import nn

import pfml
from pfml.cli import main
from pfml.data import Preprocessing
from pfml.methods import LossConfig, create_loss
from pfml.models import Embedder, load_embedder
from pfml.own_code import TRUST, UntrustedCodeError
from pfml.training import BatchConfig, Monitor, load_field, load_loss
from small_data import InterruptAt, few_glyphs, small_config

SMALL = Preprocessing(16, 16)


class CenterLoss(nn.Module):
    """Pulls samples to the center of their class; it learns the centers and counts its calls."""

    def __init__(self, num_classes, embedding_dim, *, pull=1.0):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(num_classes, embedding_dim, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.pull = pull

    def forward(self, embeddings, labels):
        self.calls += 1
        distances = torch.cdist(embeddings, nn.functional.normalize(self.centers))
        return self.pull * nn.functional.cross_entropy(-4 * distances, labels)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Dropout(0.1), nn.AdaptiveAvgPool2d(2), nn.Flatten())


def trained(out, *, resume=False, monitor=None, loss=None, config=None):
    embedder = Embedder.wrap(network(), SMALL, embedding_dim=8)
    torch.manual_seed(2)
    loss = loss or CenterLoss(8, 8)
    config = config or small_config(checkpoint_every=3, loss=LossConfig())
    results = pfml.train(few_glyphs(), embedder, config, loss=loss, out=out, resume=resume, monitor=monitor)
    return results, embedder, loss


def test_a_network_and_a_loss_of_ones_own_train_and_resume_to_the_bit(tmp_path):
    results, embedder, loss = trained(tmp_path / "run")
    assert int(loss.calls) == 8
    assert results["last"]["epoch"] == 2
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "resumed", monitor=InterruptAt(5))
    again, other, learned = trained(tmp_path / "resumed", resume=True)
    assert again["last"]["test"] == results["last"]["test"]
    for name, value in embedder.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    assert torch.equal(learned.centers, loss.centers)
    assert int(learned.calls) == 8


class Listener(Monitor):
    """Writes down what it hears, and ends the run after so many evaluations."""

    def __init__(self, evaluations):
        self.heard, self.left = [], evaluations

    def start(self, epochs, steps_per_epoch, steps_done):
        self.heard.append(("start", epochs, steps_per_epoch, steps_done))

    def step(self, epoch, loss, images_per_second):
        self.heard.append(("step", epoch))

    def evaluated(self, entry):
        self.heard.append(("evaluated", entry["epoch"]))
        self.left -= 1
        if not self.left:
            raise StopIteration("enough")

    def stop(self):
        self.heard.append(("stop",))


def test_several_monitors_hear_of_a_run_and_may_end_it(tmp_path):
    first, second = Listener(9), Listener(1)
    with pytest.raises(StopIteration, match="enough"):
        trained(tmp_path, monitor=[first, second])
    steps = [("step", 0)] * 4
    assert first.heard == second.heard == [("start", 2, 4, 0), *steps, ("evaluated", 1), ("stop",)]
    results, _, _ = trained(tmp_path, resume=True)
    assert results["last"]["epoch"] == 2


def test_what_was_trained_is_loaded_with_the_code_that_is_given(tmp_path, monkeypatch):
    _, embedder, loss = trained(tmp_path)
    images = list(few_glyphs().test.images[:3])
    assert torch.equal(load_embedder(tmp_path, network=network()).encode(images), embedder.encode(images))
    assert load_field(tmp_path).proxies.shape == (8, 0, 8)  # it has none that it would tell
    with pytest.raises(UntrustedCodeError, match="test_own_parts:CenterLoss"):
        load_loss(tmp_path)
    monkeypatch.setenv(TRUST, __name__)
    assert torch.equal(load_loss(tmp_path).centers, loss.centers)


def test_a_loss_of_a_library_is_taken_as_it_is(tmp_path):
    losses = pytest.importorskip("pytorch_metric_learning.losses", reason="needs the extra methods")
    results, _, _ = trained(tmp_path, loss=losses.TripletMarginLoss())
    assert json.loads((tmp_path / "results.json").read_text())["last"]["test"] == results["last"]["test"]
    assert "TripletMarginLoss" in (tmp_path / "config.yaml").read_text()


def test_proxies_that_a_loss_tells_are_stored(tmp_path):
    class WithProxies(CenterLoss):
        def proxy_points(self):
            return self.centers[:, None]

    results, _, loss = trained(tmp_path, loss=WithProxies(8, 8))
    assert torch.equal(load_field(tmp_path).proxies, loss.centers.detach()[:, None])
    assert results["alignment"]["paper"] > 0


def pairs_of(folder):
    """A list of (path, label) of eight classes of six images each."""
    images, listed = few_glyphs().train, []
    for k in range(0, len(images), len(images) // 48):
        path = folder / f"{k}.png"
        Image.fromarray(images.images[k].permute(1, 2, 0).numpy()).save(path)
        listed.append((path, images.class_names[int(images.labels[k])]))
    return listed


def test_pairs_train_in_the_next_free_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = small_config(epochs=1, batch=BatchConfig(8, 2))
    for number in (1, 2):
        embedder = Embedder.wrap(network(), SMALL, embedding_dim=8)
        results = pfml.train(pairs_of(tmp_path), embedder, config)
        assert results["run"] == f"runs/images-{number}"
        assert (tmp_path / results["run"] / "results.json").is_file()
    assert len(embedder.trained_on.class_names) == 4


def test_a_dataset_trains_and_resumes(tmp_path):
    images = few_glyphs().train
    items = [(image, int(label)) for image, label in zip(images.images, images.labels, strict=True)]
    config = small_config(checkpoint_every=1)

    def run(out, **more):
        embedder = Embedder.wrap(network(), SMALL, embedding_dim=8)
        data = pfml.load_data(items, split="images")
        return pfml.train(data, embedder, config, out=tmp_path / out, **more), embedder

    whole, embedder = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("parts", monitor=InterruptAt(3))
    resumed, other = run("parts", resume=True)
    assert resumed["last"]["test"] == whole["last"]["test"]
    assert all(torch.equal(a, b) for a, b in zip(embedder.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match="other images or labels|other content|other ones"):
        pfml.train(pfml.load_data(items[:-8], split="images"), other, config, out=tmp_path / "parts", resume=True)


class Unlucky(CenterLoss):
    def forward(self, embeddings, labels):
        return super().forward(embeddings, labels).expand(2)


class Hoarder(CenterLoss):
    def get_extra_state(self):
        return ["seen"]

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": Unlucky(8, 8)}, r"must return a scalar tensor, got a tensor of shape \(2,\)"),
        ({"loss": Hoarder(8, 8)}, "cannot be saved.*'_extra_state'"),
        ({"loss": "triplet"}, "must be a torch.nn.Module, got str"),
        ({"loss": CenterLoss(8, 8), "config": small_config(loss=LossConfig("arcface"))}, "give the loss once"),
    ],
)
def test_losses_that_cannot_be_used_are_refused(tmp_path, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        trained(tmp_path / "run", **options)


def test_a_bare_network_and_swapped_arguments_are_explained(tmp_path):
    for arguments in ((few_glyphs(), network()), (Embedder.wrap(network(), SMALL), few_glyphs())):
        with pytest.raises(TypeError, match=r"the data first.*Embedder\.wrap\(network, Preprocessing"):
            pfml.train(*arguments, out=tmp_path / "run")
    with pytest.raises(ValueError, match="out must name the run"):
        pfml.train(few_glyphs(), Embedder.wrap(network(), SMALL), resume=True)


def test_a_loss_that_is_no_scalar_is_one_sentence_for_the_command_line(tmp_path):
    with pytest.raises(ValueError, match="must return a scalar tensor"):  # the kind that becomes a sentence there
        trained(tmp_path / "run", loss=Unlucky(8, 8))


@pytest.fixture
def folder_with_code(tmp_path, monkeypatch):
    (tmp_path / "parts_of_mine.py").write_text(
        "import torch\nfrom torch import nn\nfrom pfml.data import Preprocessing\n"
        "def network():\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU()), Preprocessing(16, 16)\n"
        "class Loss(nn.Module):\n"
        "    def __init__(self, embedding_dim, scale=1.0):\n"
        "        super().__init__()\n"
        "        self.scale = scale\n"
        "    def forward(self, points, labels):\n"
        "        same = labels[:, None] == labels\n"
        "        return self.scale * (torch.cdist(points, points) * torch.where(same, 1.0, -0.1)).mean()\n"
    )
    for path, name in pairs_of(tmp_path):
        (tmp_path / "photos" / name).mkdir(parents=True, exist_ok=True)
        path.rename(tmp_path / "photos" / name / path.name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("pfml.own_code._trusted", set())
    yield tmp_path
    sys.modules.pop("parts_of_mine", None)


def test_the_command_takes_a_network_and_a_loss_by_name(folder_with_code, monkeypatch, capsys):
    model = ["--model.backbone", "parts_of_mine:network", "--model.embedding_dim", "4"]
    loss = ["--loss.name", "parts_of_mine:Loss", "--loss.options.scale", "2"]
    batch = ["--batch.size", "8", "--batch.samples_per_class", "2"]
    main(["train", "--data", "photos", *model, *loss, *batch, "--epochs", "1", "--device", "cpu"])
    run = folder_with_code / "runs" / "photos-parts_of_mine-Loss-1"
    assert json.loads((run / "results.json").read_text())["last"]["epoch"] == 1
    assert "parts_of_mine:network" in (run / "model" / "model.json").read_text()
    monkeypatch.setattr("pfml.own_code._trusted", set())  # as in another process
    with pytest.raises(SystemExit, match="PFML_TRUST=parts_of_mine"):
        main(["evaluate", str(run), "--device", "cpu"])
    monkeypatch.setenv(TRUST, "parts_of_mine")
    main(["evaluate", str(run), "--device", "cpu"])
    assert "R@1" in capsys.readouterr().out
    assert load_loss(run).scale == 2


def test_a_named_loss_gets_the_sizes_that_it_takes(monkeypatch):
    monkeypatch.setenv(TRUST, f"{__name__},torch.nn")
    assert create_loss(LossConfig(f"{__name__}:CenterLoss", {"pull": 3.0}), 5, 4).centers.shape == (5, 4)
    assert isinstance(create_loss(LossConfig("torch.nn:CrossEntropyLoss"), 5, 4), nn.CrossEntropyLoss)
    with pytest.raises(ValueError, match="do not fit"):
        create_loss(LossConfig(f"{__name__}:CenterLoss", {"push": 3.0}), 5, 4)
    with pytest.raises(ValueError, match="did you mean"):
        LossConfig("proxyanchor")
