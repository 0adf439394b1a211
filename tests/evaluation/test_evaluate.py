"""From images to metrics: an embedder that embeds the mean color, so that every number can be foretold."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pfml.data.image_set import ImageSet, RetrievalData, SeenClassError
from pfml.data.image_source import open_images
from pfml.data.preprocessing import Preprocessing
from pfml.evaluation import embed, evaluate, retrieval_metrics
from pfml.models import TrainedOn, create_embedder

NAMES = ("red", "green", "blue")


class MeanColor(nn.Module):
    """Embeds an image as its mean color; notes how it was called."""

    embedding_dim = 3

    def __init__(self, trained_on=None):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.BatchNorm1d(3)
        self.preprocessing = Preprocessing(resize=8, crop=8)
        self.trained_on = trained_on
        self.calls = []

    def forward(self, images):
        product = torch.ones(2, 2, device=images.device) @ torch.ones(2, 2, device=images.device)
        self.calls.append((len(images), self.training, torch.is_inference_mode_enabled(), product.dtype))
        return self.scale * images.mean(dim=(2, 3))


def colored(num_images=12, seed=0, names=NAMES, height=8, width=12):
    """Noise around pure colors."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_images) % len(names)
    noise = torch.randint(0, 120, (num_images, 3, height, width), generator=generator)
    tint = 6 * torch.eye(3)[labels % 3][:, :, None, None]
    return ImageSet((noise + tint).to(torch.uint8), labels, names)


def means(images):
    """Mean colors of the center crops, by hand."""
    return images.images[:, :, :, 2:10].float().mean(dim=(2, 3)) / 255


def data(**changes):
    train = colored(4, names=("black", "white"))
    return RetrievalData("colors", train=train, test=colored(30), recall_at=(1, 5), **changes)


def test_embeddings_come_in_the_order_of_the_images_in_float32():
    images = colored(11)
    embedder = MeanColor()
    embeddings = embed(embedder, images, batch_size=4)
    torch.testing.assert_close(embeddings, means(images))
    assert [size for size, *_ in embedder.calls] == [4, 4, 3]
    assert not embeddings.is_inference()
    assert not embeddings.requires_grad


def test_an_open_source_can_be_embedded_again_and_again():
    images = colored(11)
    source = open_images(images)
    torch.testing.assert_close(embed(MeanColor(), source), means(images))
    torch.testing.assert_close(embed(MeanColor(), source, batch_size=2), means(images))


def test_the_embedder_is_evaluated_in_evaluation_mode_and_left_as_it_was():
    embedder = MeanColor().train()
    embedder.frozen.eval()
    embed(embedder, colored(3))
    assert [(training, inference) for _, training, inference, _ in embedder.calls] == [(False, True)]
    assert embedder.training
    assert not embedder.frozen.training


def test_the_mode_is_restored_after_an_error():
    embedder = MeanColor().train()
    embedder.scale = nn.Parameter(torch.ones(2))
    with pytest.raises(RuntimeError):
        embed(embedder, colored(3))
    assert embedder.training


def test_autocast_reaches_the_model_and_the_result_is_float32():
    embedder = MeanColor()
    assert embed(embedder, colored(3), autocast=torch.bfloat16).dtype == torch.float32
    embed(embedder, colored(3))
    assert [dtype for *_, dtype in embedder.calls] == [torch.bfloat16, torch.float32]


def test_images_of_other_sizes_are_cropped_by_threads():
    images = ImageSet.unlabeled(torch.randint(0, 256, (5, 3, 20, 26), dtype=torch.uint8))
    embedder = create_embedder("convnet", embedding_dim=4)
    expected = embedder.encode(list(images.images))
    torch.testing.assert_close(embed(embedder, open_images(images, workers=2)), expected, rtol=1e-4, atol=1e-5)


def test_progress_is_shown():
    seen = []

    def track(iterable, description, total):
        seen.append((description, total))
        return iterable

    embed(MeanColor(), colored(10), batch_size=4, track=track)
    assert ("embedding", 3) in seen


def test_the_test_images_are_searched_among_each_other_at_the_ks_of_the_data_set():
    colors = data()
    expected = retrieval_metrics(means(colors.test), colors.test.labels, recall_at=(1, 5))
    assert evaluate(MeanColor(), colors) == expected
    assert 0 < expected.r_precision < 1
    assert set(evaluate(MeanColor(), colors, recall_at=(3,)).recall) == {3}
    assert set(evaluate(MeanColor(), colors.test).recall) == {1, 2, 4, 8}
    assert evaluate(MeanColor(), colors.test).map_at_r == expected.map_at_r


def test_queries_are_searched_in_the_gallery_if_there_is_one():
    colors = data(gallery=colored(24, seed=1))
    expected = retrieval_metrics(
        means(colors.test),
        colors.test.labels,
        gallery=means(colors.gallery),
        gallery_labels=colors.gallery.labels,
        recall_at=(1, 5),
    )
    assert evaluate(MeanColor(), colors) == expected
    sources = {"test_source": open_images(colors.test), "gallery_source": open_images(colors.gallery)}
    assert evaluate(MeanColor(), colors, **sources) == expected


def test_nmi_and_its_seed_arrive():
    colors = data()
    values = [evaluate(MeanColor(), colors, nmi=True, seed=seed).nmi for seed in range(4)]
    expected = [retrieval_metrics(means(colors.test), colors.test.labels, nmi=True, seed=seed).nmi for seed in range(4)]
    assert values == expected


def test_classes_that_the_embedder_was_trained_on_are_refused():
    with pytest.raises(SeenClassError, match="test classes must be unseen, but green is also trained on"):
        evaluate(MeanColor(TrainedOn("colors", ("green", "pink"))), data())
    with pytest.raises(SeenClassError, match="evaluated classes"):
        evaluate(MeanColor(TrainedOn("colors", ("green", "pink"))), data().test)
    evaluate(MeanColor(TrainedOn("colors", ("black", "white"))), data())


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        embed(MeanColor(), colored(), batch_size=0)
    with pytest.raises(ValueError, match="gallery_source must be left out"):
        evaluate(MeanColor(), data(), gallery_source=open_images(colored(5)))
    with pytest.raises(ValueError, match="test_source must hold the 30 images of the data, got 5"):
        evaluate(MeanColor(), data(), test_source=open_images(colored(5)))


@pytest.mark.gpu
def test_a_gpu_embeds_and_evaluates_alike():
    colors = data()
    assert embed(MeanColor(), colors.test, device="cuda").is_cuda
    assert evaluate(MeanColor(), colors, device="cuda").as_dict() == pytest.approx(
        evaluate(MeanColor(), colors).as_dict(), abs=0.05
    )
