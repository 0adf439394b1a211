"""What a loss may ask of the loop beside unit embeddings: lengths, features, a momentum network, a look at all."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pfml
from pfml.data import Augmentation
from pfml.methods import LossConfig
from pfml.models.head import Head
from pfml.runs.checkpoint import load_checkpoint
from pfml.training import OptimizerConfig
from pfml.training.loss_inputs import Crops, LossInputs
from small_data import InterruptAt, few_glyphs, small_config, small_embedder


class Curious(nn.Module):
    """Attracts samples to a weight of their class, and remembers what it was called with."""

    def __init__(self, *, momentum=None, **needs):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
        self.momentum = momentum
        self.seen = []
        for name, value in needs.items():
            setattr(self, name, value)

    def forward(self, embeddings, labels, **inputs):
        self.seen.append((embeddings, inputs))
        extra = sum(value.float().square().mean() for value in inputs.values())
        return F.cross_entropy(F.normalize(embeddings) @ self.weights.T, labels) + 0.01 * extra


def trained(out, loss, **options):
    torch.manual_seed(1)
    embedder = small_embedder()
    config = small_config(checkpoint_every=1, epochs=options.pop("epochs", 1), loss=LossConfig())
    pfml.train(few_glyphs(), embedder, config, loss=loss, out=out, **options)
    return embedder


def test_a_loss_that_asks_for_nothing_gets_unit_embeddings(tmp_path):
    loss = Curious()
    trained(tmp_path / "run", loss)
    for embeddings, inputs in loss.seen:
        torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(len(embeddings)))
        assert inputs == {}


def test_a_loss_may_ask_for_the_length_of_embeddings(tmp_path):
    loss = Curious(needs_length=True)
    trained(tmp_path / "run", loss)
    assert all((embeddings.norm(dim=1) - 1).abs().max() > 0.1 for embeddings, _ in loss.seen)


def test_a_loss_may_ask_for_features_and_its_gradient_reaches_the_backbone(tmp_path):
    loss = Curious(needs_features=True)
    embedder = trained(tmp_path / "run", loss)
    for embeddings, inputs in loss.seen:
        assert inputs["features"].shape == (len(embeddings), embedder.head.num_features)
        assert inputs["features"].requires_grad
        torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(len(embeddings)))
    plain = trained(tmp_path / "plain", Curious())
    weights = [next(iter(each.backbone.parameters())) for each in (embedder, plain)]
    assert not torch.equal(*weights)  # the term on the features moved it


def test_a_momentum_network_starts_as_the_embedder_and_follows_it(tmp_path):
    loss = Curious(momentum=0.5)
    trained(tmp_path / "run", loss)
    (first, followed), *others = [(embeddings.detach(), inputs["followed"]) for embeddings, inputs in loss.seen]
    torch.testing.assert_close(followed, first)
    assert not followed.requires_grad
    assert all(not torch.allclose(*pair) for pair in others)
    tensors, _ = load_checkpoint(tmp_path / "run" / "checkpoints")
    now, behind = ({k.removeprefix(f"{p}/"): v for k, v in tensors.items() if k.startswith(f"{p}/")}
                   for p in ("embedder", "follower"))  # fmt: skip
    assert behind.keys() == {name for name, value in now.items() if value.is_floating_point()}
    assert any(not torch.equal(behind[name], now[name]) for name in behind)


def test_the_momentum_network_is_the_running_mean_of_the_weights():
    from pfml.training.averaging import Follower

    model = nn.Linear(2, 1, bias=False)
    follower, weights, image = Follower(model, 0.75), [], torch.tensor([[1.0, 0.0]])
    for step in range(3):
        with torch.no_grad():
            model.weight.fill_(float(step))
        if step:
            follower.update()
        weights.append(float(follower(image)))
    assert weights == pytest.approx([0.0, 0.25, 0.6875])


def test_a_run_with_all_of_it_resumes_to_the_bit(tmp_path):
    def run(out, **options):
        trained(tmp_path / out, Curious(momentum=0.9, needs_length=True, needs_features=True), epochs=2, **options)

    run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("broken", monitor=InterruptAt(5))
    run("broken", resume=True)
    whole, broken = (load_checkpoint(tmp_path / folder / "checkpoints")[0] for folder in ("whole", "broken"))
    assert whole.keys() == broken.keys()
    assert any(key.startswith("follower/") for key in whole)
    for key in whole:
        assert torch.equal(whole[key], broken[key]), key


class Looking(Curious):
    """Counts what it is shown before epochs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("looks", torch.zeros((), dtype=torch.int64))
        self.shapes = []

    def start_epoch(self, embeddings, labels):
        self.looks += 1
        self.shapes.append((tuple(embeddings.shape), tuple(labels.shape), len(self.seen)))


def test_a_loss_may_look_at_all_training_images_before_every_epoch(tmp_path):
    loss, count = Looking(), len(few_glyphs().train)
    trained(tmp_path / "run", loss, epochs=2)
    assert loss.shapes == [((count, 8), (count,), 0), ((count, 8), (count,), 4)]


def test_a_run_that_is_resumed_within_an_epoch_does_not_look_again(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "run", Looking(), epochs=2, monitor=InterruptAt(6))
    loss = Looking()
    trained(tmp_path / "run", loss, epochs=2, resume=True)
    assert int(loss.looks) == 2
    assert loss.shapes == []


def test_an_embedding_of_several_parts_is_a_unit_vector_of_unit_vectors():
    torch.manual_seed(0)
    head = Head(6, 8, parts=4)
    embedding = head(torch.randn(5, 6, 2, 2))
    torch.testing.assert_close(embedding.norm(dim=1), torch.ones(5))
    torch.testing.assert_close(embedding.view(5, 4, 2).norm(dim=2), torch.full((5, 4), 0.5))
    pooled = torch.randn(3, 6)
    torch.testing.assert_close(head.embedded(pooled)[:, :2], F.normalize(head.projected(pooled)[:, :2]) / 2)
    with pytest.raises(ValueError, match="parts must be a divisor of the 8 dimensions, got 3"):
        Head(6, 8, parts=3)


STILL = Augmentation(random_crop=False, flip=0.0)


class Spread(nn.Module):
    """Pushes embeddings apart, and keeps all that it was called with."""

    def __init__(self, **asks):
        super().__init__()
        self.calls = []
        for name, value in asks.items():
            setattr(self, name, value)

    def forward(self, embeddings, labels, **inputs):
        self.calls.append({"embeddings": embeddings.detach(), "labels": labels, **inputs})
        return (embeddings @ embeddings.T).mean()


def calls(out, augmentation=STILL, **asks):
    torch.manual_seed(0)
    loss = Spread(**asks)
    sgd = OptimizerConfig("sgd", lr=1e-3)
    config = small_config(
        epochs=1, batch_norm="freeze-all", optimizer=sgd, loss=LossConfig(), augmentation=augmentation
    )
    pfml.train(few_glyphs(), small_embedder(), config, loss=loss, out=out)
    return loss.calls


@pytest.mark.parametrize(
    ("second", "augmentation", "differ"),
    [
        (False, Augmentation(), False),
        (True, STILL, False),  # the same images in the same order
        (True, Augmentation(), True),
        (True, replace(STILL, erasing=1.0), True),
        (False, replace(STILL, erasing=1.0), False),
    ],
)
def test_a_momentum_network_sees_the_same_crops_unless_the_loss_asks_for_others(second, augmentation, differ, tmp_path):
    """At the first step it is the network that trains."""
    first = calls(tmp_path, augmentation=augmentation, momentum=0.5, needs_second_crop=second)[0]
    distances = (first["followed"] - first["embeddings"]).norm(dim=1)
    assert (distances > 1e-3).all() if differ else (distances < 1e-5).all()


def test_second_crops_need_a_network_that_sees_them():
    assert LossInputs(small_embedder(), Spread(needs_second_crop=True)).crops_per_image == 1
    assert LossInputs(small_embedder(), Spread(needs_second_crop=True, momentum=0.5)).crops_per_image == 2


def test_second_crops_leave_the_images_of_a_batch_as_they_are(tmp_path):
    plain = calls(tmp_path / "plain")
    assert "followed" not in plain[0]
    other = calls(tmp_path / "other", momentum=0.5, needs_second_crop=True)
    assert [call["labels"].tolist() for call in plain] == [call["labels"].tolist() for call in other]


@pytest.mark.parametrize("pooling", [None, "avg+max", "max"])
def test_features_are_pooled_as_the_loss_asks_and_the_embedding_as_ever(pooling):
    embedder = small_embedder(pooling="avg").eval()
    images = torch.rand(3, 3, 16, 16)
    inputs = LossInputs(embedder, Spread(needs_features=True, feature_pooling=pooling))
    embeddings, others = inputs.of(inputs.network(images), Crops(images, images))
    torch.testing.assert_close(embeddings, embedder(images))
    torch.testing.assert_close(others["features"], embedder.features(images, [pooling or "avg"]))
    cached = embedder.features(images)
    embeddings, others = inputs.of(inputs.network(cached), Crops(cached, cached))
    torch.testing.assert_close(embeddings, embedder(images))
    torch.testing.assert_close(others["features"], cached)


def test_an_unknown_pooling_is_refused():
    with pytest.raises(ValueError, match="feature_pooling must be one of avg, max, .* got 'mean'"):
        LossInputs(small_embedder(), Spread(needs_features=True, feature_pooling="mean"))
