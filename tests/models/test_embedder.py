"""The embedder: what it computes, how it is stored, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from pfml.data.preprocessing import Preprocessing
from pfml.models import Embedder, EmbedderConfig, TrainedOn, create_embedder, load_embedder
from pfml.storage.files import DamagedFileError, save_tensors, sha256_of


@pytest.fixture
def embedder() -> Embedder:
    torch.manual_seed(0)
    embedder = create_embedder("convnet", embedding_dim=16)
    embedder(torch.rand(8, 3, 32, 32))  # statistics that are not the initial ones
    return embedder


@pytest.fixture
def saved(embedder: Embedder, tmp_path: Path) -> Path:
    embedder.save(tmp_path / "saved")
    return tmp_path / "saved"


def test_images_become_unit_vectors_in_float32(embedder: Embedder) -> None:
    points = embedder(torch.rand(5, 3, 32, 32))
    assert (points.shape, points.dtype, embedder.embedding_dim) == ((5, 16), torch.float32, 16)
    torch.testing.assert_close(points.norm(dim=1), torch.ones(5))


def test_images_are_normalized_inside(embedder: Embedder) -> None:
    images = torch.rand(2, 3, 32, 32)
    embedder.eval()
    by_hand = embedder.head(embedder.backbone((images - 0.5) / 0.5))
    torch.testing.assert_close(embedder(images), by_hand)
    embedder.preprocessing = Preprocessing(resize=32, crop=32)
    assert not torch.allclose(embedder(images), by_hand, atol=1e-3)


def test_head_and_trunk_share_out_the_parameters(embedder: Embedder) -> None:
    head, trunk = embedder.head_parameters(), embedder.backbone_parameters()
    assert len(head) == 2
    assert {id(p) for p in (*head, *trunk)} == {id(p) for p in embedder.parameters()}
    assert not {id(p) for p in head} & {id(p) for p in trunk}


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"embedding_dim": 7}, (7,)),
        ({"embedding_dim": None}, (96,)),
    ],
)
def test_embedding_dim_sets_the_dimension(options: dict[str, int | None], shape: tuple[int]) -> None:
    assert create_embedder("convnet", **options)(torch.rand(2, 3, 32, 32)).shape[1:] == shape


@pytest.mark.parametrize("options", [{"pooling": "max"}, {"pooling": "avg+max"}, {"layer_norm": "features"}])
def test_pooling_and_layer_norm_reach_the_head(options: dict[str, str]) -> None:
    points = []
    for chosen in ({}, options):
        torch.manual_seed(0)
        points.append(create_embedder("convnet", **chosen)(torch.rand(4, 3, 32, 32)))
    assert not torch.allclose(*points, atol=1e-3)


def test_image_size_changes_what_the_backbone_sees() -> None:
    embedder = create_embedder("convnet", image_size=40)
    assert (embedder.preprocessing.resize, embedder.preprocessing.crop) == (40, 40)


def test_the_size_may_change_where_the_backbone_takes_it_and_can_be_built_for_it(tmp_path: Path) -> None:
    fixed = {
        "pit_ti_224": (224, 256),  # which cannot add its positions
        "test_vit": (160, 192),  # which resizes them, and would be loaded with those of another size
    }
    for name, (own, larger) in fixed.items():
        transformer = create_embedder(name, weights="none", embedding_dim=8)
        with pytest.raises(ValueError, match=f"{name} is built for images of {own} pixels, got {larger}: set"):
            transformer.set_image_size(larger)
        transformer.set_image_size(own)
    flat = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 8, 8), torch.nn.Flatten())
    with pytest.raises(ValueError, match="is built for images of 16 pixels, got 24"):
        Embedder.wrap(flat, Preprocessing(16, 16), embedding_dim=4).set_image_size(24)
    for name in ("swiftformer_xs", "convnet"):
        embedder, drawn = create_embedder(name, weights="none", embedding_dim=8).train(), torch.get_rng_state()
        embedder.set_image_size(96)
        assert embedder.training
        assert torch.equal(torch.get_rng_state(), drawn), "what is drawn next does not depend on it"
        embedder.save(tmp_path / name)
        loaded, images = load_embedder(tmp_path / name), torch.rand(2, 3, 96, 96)
        assert loaded.preprocessing == embedder.preprocessing
        torch.testing.assert_close(loaded(images), embedder.eval()(images))


def test_a_vision_transformer_embeds_by_its_token_or_by_its_patches() -> None:
    torch.manual_seed(0)
    options = {"weights": "none", "embedding_dim": 8, "image_size": 32}
    by_token = create_embedder("vit_tiny_patch16_224", pooling="token", **options)
    by_patches = create_embedder("vit_tiny_patch16_224", pooling="avg", **options)
    by_patches.load_state_dict(by_token.state_dict())
    images = torch.rand(2, 3, 32, 32)
    tokens = by_token.eval().backbone(by_token.preprocessing.normalize(images))
    linear = by_token.head.linear
    expected = torch.nn.functional.normalize(linear(tokens[:, 0]))
    torch.testing.assert_close(by_token(images), expected)
    expected = torch.nn.functional.normalize(linear(tokens[:, 1:].mean(1)))
    torch.testing.assert_close(by_patches.eval()(images), expected)


def test_a_frozen_patch_embedding_does_not_train_and_the_rest_does() -> None:
    options = {"weights": "none", "image_size": 32, "pooling": "token"}
    embedder = create_embedder("vit_tiny_patch16_224", freeze_patch_embedding=True, **options)
    frozen = {name for name, p in embedder.named_parameters() if not p.requires_grad}
    assert frozen == {"backbone.network.patch_embed.proj.weight", "backbone.network.patch_embed.proj.bias"}
    assert all(p.requires_grad for p in create_embedder("vit_tiny_patch16_224", **options).parameters())


def test_weights_are_loaded_from_a_file(embedder: Embedder, tmp_path: Path) -> None:
    save_tensors(tmp_path / "trunk.safetensors", embedder.backbone.state_dict())
    other = create_embedder("convnet", weights=str(tmp_path / "trunk.safetensors"))
    assert torch.equal(other.backbone.layers[0].weight, embedder.backbone.layers[0].weight)


def test_default_weights_of_efficientnet_lite0_need_no_network() -> None:
    trained = create_embedder("efficientnet_lite0").backbone.state_dict()
    again = create_embedder("efficientnet_lite0").backbone.state_dict()
    assert all(torch.equal(trained[name], again[name]) for name in trained)


def test_default_weights_of_a_backbone_without_any_ask_for_a_file() -> None:
    with pytest.raises(ValueError, match="--model.weights FILE"):
        create_embedder("resnet50_he")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"image_size": 0}, ValueError, "image_size must be a positive integer or None, got 0"),
        ({"freeze_patch_embedding": "yes"}, TypeError, "freeze_patch_embedding must be True or False, got 'yes'"),
        ({"freeze_patch_embedding": True}, ValueError, "freeze_patch_embedding needs a backbone that has one"),
        ({"pooling": "token"}, ValueError, "pooling='token' needs a backbone with a CLS token"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        create_embedder("convnet", **options)


# ---- encode


def test_files_pillow_images_and_tensors_of_one_picture_are_encoded_alike(embedder: Embedder, tmp_path: Path) -> None:
    pixels = numpy.random.default_rng(0).integers(0, 256, (45, 60, 3), dtype=numpy.uint8)
    picture = Image.fromarray(pixels)
    picture.save(tmp_path / "picture.png")
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    points = embedder.encode([tmp_path / "picture.png", str(tmp_path / "picture.png"), picture, tensor, tensor / 255])
    assert points.shape == (5, 16)
    torch.testing.assert_close(points, points[:1].expand(5, -1))


def test_encode_resizes_and_crops_as_the_preprocessing_says(embedder: Embedder) -> None:
    image = torch.randint(0, 256, (3, 64, 96), dtype=torch.uint8)
    resized = torch.nn.functional.interpolate(
        image[None].float(), size=(32, 48), mode="bilinear", antialias=True, align_corners=False
    )
    expected = embedder.eval()(resized[..., 8:40] / 255)
    torch.testing.assert_close(embedder.encode([image]), expected, rtol=1e-4, atol=1e-4)


def test_grayscale_and_transparent_pictures_are_encoded(embedder: Embedder) -> None:
    gray = Image.fromarray(numpy.random.default_rng(0).integers(0, 256, (40, 40), dtype=numpy.uint8))
    points = embedder.encode([gray, gray.convert("RGB"), gray.convert("RGBA")])
    assert torch.equal(points[0], points[1])
    assert torch.equal(points[0], points[2])


def test_batch_size_does_not_change_the_points(embedder: Embedder) -> None:
    images = [torch.rand(3, 32 + k, 40) for k in range(5)]
    sizes: list[int] = []
    embedder.backbone.register_forward_hook(lambda module, images, features: sizes.append(len(features)))
    whole, split = embedder.encode(images), embedder.encode(images, batch_size=2)
    torch.testing.assert_close(whole, split)
    assert sizes == [5, 2, 2, 1]


def test_encode_neither_trains_nor_leaves_another_mode_behind(embedder: Embedder) -> None:
    embedder.train()
    embedder.backbone.layers[2].eval()
    before = {name: tensor.clone() for name, tensor in embedder.state_dict().items()}
    points = embedder.encode([torch.rand(3, 32, 32)] * 3)
    assert not points.requires_grad
    assert all(torch.equal(tensor, before[name]) for name, tensor in embedder.state_dict().items())
    assert embedder.training
    assert embedder.backbone.layers[6].training
    assert not embedder.backbone.layers[2].training


def test_encode_of_nothing_is_empty(embedder: Embedder) -> None:
    assert embedder.encode([]).shape == (0, 16)


@pytest.mark.gpu
def test_encode_on_a_gpu_gives_the_same_points_on_the_cpu(embedder: Embedder) -> None:
    images = [torch.rand(3, 40, 40) for _ in range(3)]
    here = embedder.encode(images)
    there = embedder.encode(images, device="cuda")
    assert there.device.type == "cpu"
    torch.testing.assert_close(here, there, rtol=1e-2, atol=1e-3)


def test_encode_moves_the_embedder_to_the_device(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[object] = []
    monkeypatch.setattr(embedder, "to", moved.append)
    embedder.encode([torch.rand(3, 32, 32)], device="cpu")
    assert moved == ["cpu"]


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (["gone.jpg"], ValueError, "gone.jpg"),
        ("a.jpg", TypeError, "must be a sequence of images, got the one path 'a.jpg'"),
        ([torch.rand(3, 8, 8), torch.rand(1, 8, 8)], ValueError, r"\(3, H, W\), got shape \(1, 8, 8\) at index 1"),
        ([7], TypeError, "must be paths, PIL images or tensors, got int at index 0"),
        ([Image.new("I;16", (40, 40))], ValueError, "8 bits per channel, got mode 'I;16' at index 0"),
    ],
)
def test_what_is_no_image_is_refused(
    embedder: Embedder, images: list[object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        embedder.encode(images)


def test_a_batch_size_below_1_is_refused(embedder: Embedder) -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        embedder.encode([], batch_size=0)


# ---- save and load


def test_a_loaded_embedder_gives_identical_points(embedder: Embedder, saved: Path) -> None:
    images = torch.rand(4, 3, 32, 32)
    loaded = load_embedder(saved)
    assert not loaded.training
    assert torch.equal(loaded(images), embedder.eval()(images))
    assert loaded.config == embedder.config
    assert loaded.preprocessing == embedder.preprocessing
    assert loaded.trained_on is None


def test_every_option_and_the_preprocessing_are_stored(tmp_path: Path) -> None:
    embedder = create_embedder(
        "vit_tiny_patch16_224",
        weights="none",
        embedding_dim=12,
        pooling="token",
        layer_norm="embedding",
        parts=3,
        relations=2,
        sub_blocks=3,
        freeze_patch_embedding=True,
        image_size=32,
        resize=40,
        flip_test=True,
    )
    default = EmbedderConfig()
    assert all(getattr(embedder.config, f.name) != getattr(default, f.name) for f in dataclasses.fields(default))
    embedder.preprocessing = Preprocessing(40, 32, "bilinear", (1.0, 2.0, 3.0), (4.0, 5.0, 6.0), "bgr", 255.0)
    embedder.save(tmp_path)
    loaded = load_embedder(tmp_path)
    assert loaded.config == embedder.config
    assert loaded.preprocessing == embedder.preprocessing
    assert sum(not p.requires_grad for p in loaded.parameters()) == 2


def test_a_flip_test_averages_features_of_image_and_mirror_image_outside_of_training() -> None:
    torch.manual_seed(0)
    plain = create_embedder("convnet", embedding_dim=8, pooling="gem").eval()
    flipped = create_embedder("convnet", embedding_dim=8, pooling="gem", flip_test=True).eval()
    flipped.load_state_dict(plain.state_dict())
    images = torch.rand(3, 3, 32, 32)
    features = (plain.features(images) + plain.features(images.flip(-1))) / 2
    assert torch.allclose(flipped.features(images), features, atol=1e-6)
    assert torch.allclose(flipped(images), plain.head.embedded(features), atol=1e-6)
    assert torch.allclose(flipped(images), flipped(images.flip(-1)), atol=1e-6)
    assert not torch.allclose(flipped(images), plain(images), atol=1e-4)
    plain.train()
    flipped.train()
    assert torch.equal(flipped(images), plain(images))


def test_loading_never_touches_a_hub_or_the_original_weight_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import timm

    create, asked = timm.create_model, []

    def offline(name: str, *, pretrained: bool, **options: object) -> torch.nn.Module:
        asked.append(pretrained)
        return create(name, pretrained=False, **options)

    monkeypatch.setattr(timm, "create_model", offline)
    embedder = create_embedder("resnet10t", weights="hub", embedding_dim=8)
    assert True in asked
    embedder.save(tmp_path)
    asked.clear()
    assert load_embedder(tmp_path).config.weights == "hub"
    assert asked == [False]


def test_what_it_was_trained_on_is_stored_and_kept(embedder: Embedder, tmp_path: Path) -> None:
    learned = TrainedOn("cub200", ("wren", "owl"))
    embedder.save(tmp_path / "first", trained_on=learned)
    loaded = load_embedder(tmp_path / "first")
    assert loaded.trained_on == learned
    loaded.save(tmp_path / "second")
    assert load_embedder(tmp_path / "second").trained_on == learned


def test_the_model_of_a_run_is_found_in_the_run(embedder: Embedder, tmp_path: Path) -> None:
    embedder.save(tmp_path / "run" / "model")
    assert load_embedder(tmp_path / "run").config == embedder.config
    assert load_embedder(str(tmp_path / "run" / "model")).config == embedder.config


def test_saving_again_replaces_the_model(embedder: Embedder, saved: Path) -> None:
    with torch.no_grad():
        embedder.head.linear.weight.mul_(-1)
    embedder.save(saved)
    assert torch.equal(load_embedder(saved).head.linear.weight, embedder.head.linear.weight)
    assert {path.name for path in saved.iterdir()} == {"README.md", "model.json", weights_of(saved).name}


def weights_of(folder: Path) -> Path:
    (path,) = folder.glob("model-*.safetensors")
    return path


def test_a_save_that_fails_leaves_the_model_before_it(
    embedder: Embedder, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = embedder.head.linear.weight.detach().clone()
    with torch.no_grad():
        embedder.head.linear.weight.mul_(-1)

    def full(path: Path, content: bytes) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("pfml.storage.manifest.write_atomically", full)
        with pytest.raises(OSError, match="no space left"):
            embedder.save(saved)
    assert torch.equal(load_embedder(saved).head.linear.weight, before)
    embedder.save(saved)
    assert len(list(saved.glob("*.safetensors"))) == 1


def test_the_model_card_says_what_it_is_and_how_to_load_it(embedder: Embedder, tmp_path: Path) -> None:
    embedder.save(tmp_path, trained_on=TrainedOn("cub200", ("wren", "owl")))
    card = (tmp_path / "README.md").read_text()
    for words in ("convnet", "| dimensions | 16 |", "cub200, 2 classes", "center crop 32", "load_embedder("):
        assert words in card


def flip_a_weight(folder: Path) -> None:
    content = bytearray(weights_of(folder).read_bytes())
    content[-100] ^= 1
    weights_of(folder).write_bytes(content)


def cut_the_weights(folder: Path) -> None:
    weights_of(folder).write_bytes(weights_of(folder).read_bytes()[:-4])


def drop_the_weights(folder: Path) -> None:
    weights_of(folder).unlink()


def drop_the_manifest(folder: Path) -> None:
    (folder / "model.json").unlink()


def cut_the_manifest(folder: Path) -> None:
    (folder / "model.json").write_bytes((folder / "model.json").read_bytes()[:-20])


def change_the_mean(folder: Path) -> None:
    (folder / "model.json").write_text((folder / "model.json").read_text().replace("0.5", "0.4", 1))


def write_a_later_version(folder: Path) -> None:
    manifest = json.loads((folder / "model.json").read_text()) | {"format_version": 99}
    (folder / "model.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (flip_a_weight, DamagedFileError, r"safetensors must have sha256"),
        (cut_the_weights, DamagedFileError, r"safetensors must have [\d,]+ bytes, got"),
        (drop_the_weights, FileNotFoundError, r"model.json must have model-.*safetensors beside it"),
        (drop_the_manifest, FileNotFoundError, r"there is no model.json in either"),
        (cut_the_manifest, DamagedFileError, r"model.json must be a whole JSON file"),
        (change_the_mean, DamagedFileError, r"model.json does not match its own checksum"),
        (write_a_later_version, ValueError, r"model.json must be an embedder of format version 1, got version 99"),
    ],
)
def test_a_damaged_model_is_refused_by_name(
    saved: Path, damage: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    load_embedder(saved)
    damage(saved)
    with pytest.raises(error, match=message):
        load_embedder(saved)


def test_every_flipped_byte_of_the_manifest_is_noticed(saved: Path) -> None:
    from pfml.models.embedder import EMBEDDER
    from pfml.storage.manifest import read_manifest

    path = saved / "model.json"
    content = path.read_bytes()
    whole = read_manifest(path, EMBEDDER)
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            # white space may turn into other white space; nothing else may pass
            assert read_manifest(path, EMBEDDER) == whole
        except ValueError as error:
            assert "model.json" in str(error)


def test_nan_weights_are_neither_saved_nor_loaded(embedder: Embedder, saved: Path, tmp_path: Path) -> None:
    from pfml.storage.manifest import digest_of

    with torch.no_grad():
        embedder.head.linear.bias[3] = float("nan")
    with pytest.raises(DamagedFileError, match=r"'head.linear.bias' of what is to be saved"):
        embedder.save(tmp_path / "nan")
    assert not (tmp_path / "nan").exists()
    manifest = json.loads((saved / "model.json").read_text())
    manifest.pop("manifest_sha256")
    path = weights_of(saved)
    manifest["tensors"]["sha256"] = save_tensors(path, embedder.state_dict())
    manifest["tensors"]["bytes"] = path.stat().st_size
    (saved / "model.json").write_text(json.dumps({**manifest, "manifest_sha256": digest_of(manifest)}))
    with pytest.raises(DamagedFileError, match=r"1 NaN or Inf of 16 numbers in 'head.linear.bias' of .*safetensors"):
        load_embedder(saved)


def test_weights_of_another_model_beside_a_manifest_are_refused(saved: Path, tmp_path: Path) -> None:
    create_embedder("convnet", embedding_dim=16).save(tmp_path / "other")
    shutil.copy(weights_of(tmp_path / "other"), weights_of(saved))
    with pytest.raises(DamagedFileError, match="sha256"):
        load_embedder(saved)


def test_no_pickle_is_written(saved: Path) -> None:
    manifest = json.loads((saved / "model.json").read_text())
    assert manifest["tensors"]["sha256"] == sha256_of(weights_of(saved))
    header = int.from_bytes(weights_of(saved).read_bytes()[:8], "little")
    names = json.loads(weights_of(saved).read_bytes()[8 : 8 + header])
    assert {"head.linear.weight", "backbone.layers.0.weight"} < names.keys()


@pytest.mark.parametrize(
    ("image", "error", "words"),
    [
        (torch.zeros(3, 8, 8, dtype=torch.int64), TypeError, "uint8 or floats"),
        (torch.zeros(3, 8, 8, dtype=torch.bool), TypeError, "uint8 or floats"),
        (torch.full((3, 8, 8), 200.0), ValueError, r"lie in \[0, 1\], got 200 to 200 at index 1"),
        (torch.full((3, 8, 8), torch.nan), ValueError, "got nan"),
        (torch.zeros(3, 0, 8), ValueError, "got shape"),
    ],
)
def test_tensors_that_are_no_images_are_not_encoded(
    embedder: Embedder, image: torch.Tensor, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        embedder.encode([torch.rand(3, 8, 8), image])


def test_one_image_must_be_put_in_a_list_and_a_generator_need_not(embedder: Embedder) -> None:
    with pytest.raises(TypeError, match="put it in a list"):
        embedder.encode(Image.new("RGB", (8, 8)))  # type: ignore[arg-type]
    assert embedder.encode(Image.new("RGB", (8, 8)) for _ in range(2)).shape[0] == 2


def test_a_sealed_model_whose_preprocessing_is_of_no_use_is_refused_by_its_file(tmp_path: Path) -> None:
    embedder = create_embedder("convnet", embedding_dim=4)
    for name, values in {"std": (1e-300, 1e-300, 1e-300), "mean": (1e30, 0.0, 0.0), "crop": 10**6}.items():
        changed = Preprocessing(resize=32, crop=32)
        object.__setattr__(changed, name, values)  # as somebody who makes the checksum right, too
        embedder.preprocessing = changed
        embedder.save(tmp_path / name)
        with pytest.raises(DamagedFileError, match=r"model\.json must describe a usable embedder"):
            load_embedder(tmp_path / name)


def test_embeddings_that_are_not_finite_are_refused_and_not_given() -> None:
    embedder = create_embedder("convnet", embedding_dim=4)
    with torch.no_grad():
        for name, buffer in embedder.named_buffers():
            if name.endswith("running_var"):
                buffer.fill_(-1.0)  # finite, so that a file may hold it
    with pytest.raises(ValueError, match="embeddings must be finite, got NaN or Inf for image 0: the model is damaged"):
        embedder.encode([torch.rand(3, 32, 32)])
