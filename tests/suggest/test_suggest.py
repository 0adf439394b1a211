import math
from dataclasses import replace

import pytest
import torch

from pfml.data import ImageSet, RetrievalData, with_validation
from pfml.data.decoding import UnreadableImagesError
from pfml.evaluation import retrieval_metrics
from pfml.models import EmbedderConfig, create_embedder
from pfml.suggest.comparison import Untrained, comparison, untrained_embedder, untrained_scores
from pfml.suggest.preview import InitialDistances, distances_of, preview
from pfml.suggest.suggestion import suggest, suggest_model, with_values
from pfml.training import BatchConfig, DataConfig, LossConfig, RunConfig
from pfml.training.setup import create_batches
from small_data import few_glyphs

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def images_of(counts, prefix):
    """So many black images of each class."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    pixels = torch.zeros(len(labels), 3, 8, 8, dtype=torch.uint8)
    return ImageSet(pixels, labels, tuple(f"{prefix}{k}" for k in range(len(counts))))


def data_of(train, test=(5, 5, 5)):
    return RetrievalData("folder", images_of(train, "a"), images_of(test, "b"))


def looked(**changes):
    values = {"close_positives": 0.8, "positives": 0.9, "nearest_negatives": 0.7, "negatives": 1.1}
    return InitialDistances(**{**values, "images_per_second": 50.0, **changes})


def test_the_distances_are_those_of_all_pairs():
    generator = torch.Generator().manual_seed(0)
    points = torch.nn.functional.normalize(torch.randn(9, 4, generator=generator, dtype=torch.float64), dim=1)
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    positives, negatives, nearest = [], [], []
    for i in range(9):
        to_negatives = []
        for j in range(9):
            r = math.dist(points[i].tolist(), points[j].tolist())
            if labels[i] != labels[j]:
                to_negatives.append(r)
            if i < j:
                (positives if labels[i] == labels[j] else negatives).append(r)
        nearest.append(min(to_negatives))
    found = distances_of(points, labels, images_per_second=1.0)
    assert found.positives == pytest.approx(torch.tensor(positives).quantile(0.5).item(), abs=1e-6)
    assert found.close_positives == pytest.approx(torch.tensor(positives).quantile(0.25).item(), abs=1e-6)
    assert found.negatives == pytest.approx(torch.tensor(negatives).quantile(0.5).item(), abs=1e-6)
    assert found.nearest_negatives == pytest.approx(torch.tensor(nearest).quantile(0.5).item(), abs=1e-6)


def test_without_two_images_of_a_class_the_distance_of_positives_is_not_a_number():
    found = distances_of(torch.eye(3), torch.arange(3), images_per_second=1.0)
    assert math.isnan(found.positives)
    assert found.negatives == pytest.approx(math.sqrt(2))


def test_radii_follow_the_distances():
    options = suggest(data_of([40] * 12), looked(close_positives=0.62, negatives=1.03), CPU).config.loss.options
    assert (options["delta"], options["delta_rep"]) == (0.62, 1.03)
    options = suggest(data_of([40] * 12), looked(close_positives=0.02, negatives=0.1), CPU).config.loss.options
    assert (options["delta"], options["delta_rep"]) == (0.3, 0.5), "radii of a collapsed start are bounded"


def test_radii_come_from_other_classes_where_no_class_has_two_images():
    found = suggest(data_of([1] * 12), looked(close_positives=math.nan, nearest_negatives=0.7), CPU)
    assert found.config.loss.options["delta"] == 0.63
    assert "no class has two images" in found.reasons["loss.options.delta"]


def test_without_distances_the_preset_s_radii_stay():
    assert "delta" not in suggest(data_of([40] * 12), None, CPU).config.loss.options


@pytest.mark.parametrize(("images", "proxies"), [(3, 1), (12, 2), (60, 5)])
def test_more_images_of_a_class_get_more_proxies(images, proxies):
    options = suggest(data_of([images] * 6), looked(), CPU).config.loss.options
    assert options["proxies_per_class"] == proxies


def test_a_quarter_of_the_classes_validates_if_there_are_enough():
    assert suggest(data_of([9] * 8), looked(), CPU).config.data.validation == "fold-3"
    assert suggest(data_of([9] * 7), looked(), CPU).config.data.validation == "none"
    assert suggest(data_of([9] * 6 + [1, 1]), looked(), CPU).config.data.validation == "none"
    brings_its_own = RetrievalData("csv", images_of([9] * 8, "a"), images_of([5], "b"), validation=images_of([5], "c"))
    found = suggest(brings_its_own, looked(), CPU)
    assert found.config.data.validation == "none"
    assert "of its own" in found.reasons["data.validation"]


@pytest.mark.parametrize(
    ("train", "size", "each"),
    [([50] * 40, 32, 4), ([50] * 3, 12, 4), ([2] * 5, 10, 2), ([2, 1], 2, 1), ([1, 1], 2, 1), ([1] * 9, 8, 2)],
)
def test_a_batch_never_needs_more_classes_or_images_than_there_are(train, size, each):
    batch = suggest(data_of(train), looked(), CPU).config.batch
    assert (batch.size, batch.samples_per_class) == (size, each)


def test_a_gpu_gets_larger_batches_and_mixed_precision():
    found = suggest(data_of([50] * 60), looked(), GPU).config
    assert (found.batch.size, found.autocast) == (100, "bfloat16")


@pytest.mark.parametrize(("train", "epochs"), [([50] * 100, 8), ([50] * 40, 16), ([50] * 8, 20), ([2] * 2, 20)])
def test_a_gpu_gets_epochs_by_the_number_of_steps(train, epochs):
    found = suggest(data_of(train), looked(), GPU)
    assert found.config.epochs == epochs
    assert "steps" in found.reasons["epochs"]


def test_samples_are_filtered_since_labels_may_be_noisy():
    found = suggest(data_of([50] * 8), looked(), CPU)
    assert found.config.loss.options["trust"] == 0.3
    assert "noisy labels" in found.reasons["loss.options.trust"]


@pytest.mark.parametrize(("train", "epochs"), [([10] * 4, 12), ([50] * 8, 12), ([50] * 60, 3), ([64] * 10, 8)])
def test_a_cpu_gets_epochs_by_the_number_of_steps(train, epochs):
    data = data_of(train)
    found = suggest(data, looked(), CPU, validation="none").config
    assert found.epochs == epochs
    assert epochs == min(max(math.ceil(150 / (len(data.train) // found.batch.size)), 3), 12)


@pytest.mark.parametrize("device", [CPU, GPU])
def test_the_plan_follows_from_the_images_and_the_time_is_an_estimate_beside_it(device):
    data = data_of([50] * 40, [50] * 40)
    fast, slow = (suggest(data, looked(images_per_second=speed), device) for speed in (1000.0, 1.0))
    assert fast.config == slow.config, "whatever the load of the machine"
    minutes = fast.config.epochs * (3 * 30 * 50 + 10 * 50 + 40 * 50) / 60
    assert f"about {minutes:.2g} min on this machine; a GPU would take minutes" in slow.reasons["epochs"]
    assert f"about {minutes / 1000:.2g} min on this machine" in fast.reasons["epochs"]
    assert "would take" not in fast.reasons["epochs"]


def test_a_photograph_is_seen_at_the_resolution_of_the_backbone():
    model, reasons = suggest_model()
    assert (model.image_size, model.backbone) == (None, "efficientnet_lite0")
    assert "model.image_size" not in reasons
    assert suggest(data_of([10] * 4), looked(), CPU).config.model == model


def test_a_larger_backbone_is_taken_where_its_weights_have_been_downloaded(monkeypatch, tmp_path):
    repository = tmp_path / "models--timm--vit_small_patch14_dinov2.lvd142m"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (repository / "snapshots" / ("0" * 40) / "model.safetensors").write_bytes(b"")
    assert suggest_model()[0].backbone == "efficientnet_lite0"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model, reasons = suggest_model()
    assert (model.backbone, model.pooling) == ("dinov2_small", "token")
    assert "its weights are on this machine" in reasons["model.backbone"]
    found = suggest(data_of([10] * 4), looked(), CPU)
    assert found.besides([])["model.pooling"] == "token"
    assert "model.pooling" not in found.besides(["model.backbone"])


def test_every_reason_belongs_to_an_option_and_every_choice_has_a_reason():
    found = suggest(data_of([20] * 10), looked(), CPU)
    for option in found.reasons:
        value = found.config
        for part in option.split("."):
            value = value[part] if isinstance(value, dict) else getattr(value, part)
    assert set(found.config.loss.options) == {
        name.removeprefix("loss.options.") for name in found.reasons if name.startswith("loss.options.")
    }


def test_one_class_to_train_on_is_refused_with_advice():
    with pytest.raises(ValueError, match="at least 2 classes to tell apart, got 1 .*add class folders"):
        suggest(data_of([5]), looked(), CPU)


def test_unseen_classes_of_one_image_each_are_refused_with_advice():
    with pytest.raises(ValueError, match="it needs a class with two images or more"):
        suggest(data_of([5, 5], [1, 1]), looked(), CPU)


def test_a_preview_takes_a_few_images_of_each_class_and_measures_the_speed():
    images = images_of([30] * 4, "a")
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, images.images.shape, generator=generator, dtype=torch.uint8)
    images = ImageSet(noise, images.labels, images.class_names)
    torch.manual_seed(0)
    embedder = create_embedder("convnet", embedding_dim=8)
    found = preview(embedder, images, limit=20)
    assert found.images_per_second > 0
    assert 0 < found.close_positives <= found.positives < 2


def test_an_unreadable_image_is_listed_with_all_others_of_the_set(tmp_path):
    paths = tuple(tmp_path / f"{k}.png" for k in range(300))
    for path in paths:
        path.write_bytes(b"no image")
    images = ImageSet(paths, torch.arange(300), tuple(map(str, range(300))))
    with pytest.raises(UnreadableImagesError, match="300 of 300 images cannot be read"):
        preview(create_embedder("convnet", embedding_dim=8), images, limit=20)


def scores(recall, precision, epoch=3, images=1000):
    return {"epoch": epoch, "test": {"recall_at_1": recall, "map_at_r": precision, "num_queries": images}}


def test_the_comparison_says_whether_training_has_helped():
    before = Untrained(scores(0.8, 0.5)["test"], 224)
    config = RunConfig(data=DataConfig("my pets"), model=EmbedderConfig("efficientnet_lite0"))

    def said(last, chosen=None, config=config):
        return comparison(before, {"last": last, "validation_selected": chosen}, config)

    assert said(scores(0.9, 0.6)).endswith("training has helped")
    assert said(scores(0.82, 0.6, images=100)).endswith(
        "training has helped, though with 100 images the difference of R@1 may be chance"
    )
    assert said(scores(0.7, 0.6)).endswith("helped one and not the other")
    assert "has not helped; use the pretrained model without training" in said(scores(0.7, 0.4))
    assert "has not helped" in said(scores(0.9, 0.6), chosen=scores(0.8, 0.5)), "what validation chose is judged"
    same = said(scores(0.8004, 0.6))
    assert "R@1 80.0% before training and 80.0% after" in same
    assert same.endswith("training has improved MAP@R and left R@1 as it was")
    assert said(scores(0.9, 0.5)).endswith("training has improved R@1 and left MAP@R as it was")
    assert "has not helped" in said(scores(0.8, 0.5))
    assert "pfml train --data 'my pets' --loss.name zero-shot" in said(scores(0.7, 0.4))
    by_ladder = comparison(before, {"last": scores(0.9, 0.6, epoch=0), "model": "last", "ladder": {}}, config)
    assert by_ladder.endswith(
        "R@1 80.0% before the ladder and 90.0% after, MAP@R 50.0% and 60.0%: the ladder has helped"
    )
    worse = comparison(before, {"last": scores(0.7, 0.5, epoch=0), "model": "last", "ladder": {}}, config)
    assert "the ladder has not helped here, though it did on the images that validated it" in worse
    assert "zero-shot" not in worse
    smaller = replace(config, model=replace(config.model, image_size=160))
    assert "80.0% before training (at 224 pixels) and 90.0% after (epoch 3, at 160 pixels)" in said(
        scores(0.9, 0.6), config=smaller
    )
    larger = said(scores(0.9, 0.6), config=replace(smaller, test_image_size=288))
    assert "80.0% before training (at 224 pixels) and 90.0% after (epoch 3, at 288 pixels)" in larger


def test_the_model_before_training_is_evaluated_at_its_own_resolution(monkeypatch):
    seen = []

    def evaluated(embedder, *_, **__):
        seen.append(embedder.preprocessing.crop)
        return retrieval_metrics(torch.eye(4), torch.tensor([0, 0, 1, 1]))

    monkeypatch.setattr("pfml.suggest.comparison.evaluate", evaluated)
    monkeypatch.setattr("pfml.suggest.comparison.default_weights", lambda name: "package")
    monkeypatch.setattr("pfml.models.embedder.load_weights", lambda *_: None)
    config = RunConfig(model=EmbedderConfig("convnet", embedding_dim=8, image_size=48), device="cpu")
    embedder = untrained_embedder(config)
    assert embedder.config == EmbedderConfig("convnet", embedding_dim=None)
    found = untrained_scores(embedder, few_glyphs(), config)
    assert seen == [32]
    assert found.image_size == 32


def test_a_model_without_pretrained_weights_is_not_compared():
    assert untrained_embedder(RunConfig(model=EmbedderConfig("convnet"))) is None


@pytest.mark.parametrize(
    ("given", "batch"),
    [
        ({"validation": "half"}, (12, 4)),  # 3 of the 6 classes are left
        ({"validation": "none"}, (24, 4)),
        ({"samples_per_class": 2}, (12, 2)),
        ({"samples_per_class": 0}, (24, 0)),
        ({"batch_size": 12}, (12, 4)),
        ({"batch_size": 10}, (10, 2)),
        ({"batch_size": 7}, (7, 0)),
        ({"batch_size": 48}, (48, 0)),  # 12 classes would be needed, or more images of each than most have
        ({"batch_size": 10, "samples_per_class": 5}, (10, 5)),
    ],
)
def test_what_is_given_decides_what_is_suggested_beside_it(given, batch):
    data = data_of([10] * 6)
    config = suggest(data, looked(), CPU, **given).config
    assert (config.batch.size, config.batch.samples_per_class) == batch
    assert config.data.validation == given.get("validation", "none")
    create_batches(with_validation(data, config.data.validation).train, config)


def test_values_replace_those_of_a_configuration_group_by_group():
    config = RunConfig(loss=LossConfig("pfml", {"delta": 0.4}))
    values = {"batch.size": 7, "batch.samples_per_class": 0, "loss.name": "pfml-log", "loss.options.alpha": 5.0}
    changed = with_values(config, {**values, "epochs": 3, "model.embedding_dim": None})
    assert (changed.batch, changed.epochs, changed.model.embedding_dim) == (BatchConfig(7, 0), 3, None)
    assert changed.loss == LossConfig("pfml-log", {"delta": 0.4, "alpha": 5.0})
    assert with_values(config, {}) == config


def test_a_suggestion_leaves_out_what_is_given_and_the_options_of_another_loss():
    found = suggest(data_of([20] * 10), looked(), CPU)
    assert set(found.besides(())) == set(found.reasons)
    assert set(found.reasons) - set(found.besides({"optimizer.lr"})) == {"optimizer.lr"}
    assert not [option for option in found.besides({"loss.name"}) if option.startswith("loss.")]


def test_a_given_number_of_epochs_decides_how_often_is_evaluated():
    found = suggest(data_of([10] * 4), looked(), CPU, epochs=1)
    assert (found.config.epochs, found.config.evaluate_every) == (1, 1)
    assert found.reasons["evaluate_every"] == "there are few epochs"
