"""Which parameters train when."""

from __future__ import annotations

import pytest
import torch

from pfml.models import Embedder, create_embedder
from pfml.models.freezing import freeze_statistics, set_trainable, start_training_mode

HEAD = {"head.linear.weight", "head.linear.bias"}
AFFINE = {f"backbone.layers.{layer}.{name}" for layer in (2, 6, 9) for name in ("weight", "bias")}
CONVOLUTIONS = {f"backbone.layers.{layer}.weight" for layer in (0, 4, 8)}
EVERYTHING = HEAD | AFFINE | CONVOLUTIONS


@pytest.fixture
def embedder() -> Embedder:
    return create_embedder("convnet", embedding_dim=8)


def trainable(embedder: Embedder) -> set[str]:
    return {name for name, p in embedder.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("batch_norm", "warm_up_epochs", "after"),
    [
        ("train", 0, EVERYTHING),
        ("train", 1, EVERYTHING),
        ("freeze-statistics", 0, EVERYTHING),
        ("freeze-statistics", 1, EVERYTHING),
        ("freeze", 0, EVERYTHING - AFFINE),
        ("freeze", 1, EVERYTHING),  # the end of Proxy-Anchor's warm-up un-freezes weight and bias of BatchNorm
        ("freeze-all", 0, EVERYTHING - AFFINE),
        ("freeze-all", 1, EVERYTHING - AFFINE),
    ],
)
def test_after_the_warm_up_everything_trains_but_what_the_policy_freezes(
    embedder: Embedder, batch_norm: str, warm_up_epochs: int, after: set[str]
) -> None:
    if warm_up_epochs:
        set_trainable(embedder, warming_up=True, batch_norm=batch_norm, warm_up_epochs=warm_up_epochs)
        assert trainable(embedder) == HEAD
    set_trainable(embedder, warming_up=False, batch_norm=batch_norm, warm_up_epochs=warm_up_epochs)
    assert trainable(embedder) == after


def test_a_resumed_run_needs_no_history(embedder: Embedder) -> None:
    set_trainable(embedder, warming_up=True, batch_norm="freeze", warm_up_epochs=2)
    set_trainable(embedder, batch_norm="train")
    assert trainable(embedder) == EVERYTHING


@pytest.mark.parametrize("batch_norm", ["train", "freeze-statistics", "freeze", "freeze-all"])
def test_statistics_change_in_training_only_if_they_train(embedder: Embedder, batch_norm: str) -> None:
    embedder.eval()
    start_training_mode(embedder, batch_norm=batch_norm)
    before = {name: buffer.clone() for name, buffer in embedder.named_buffers()}
    embedder(torch.rand(4, 3, 32, 32))
    unchanged = {torch.equal(before[name], buffer) for name, buffer in embedder.named_buffers()}
    assert unchanged == {batch_norm != "train"}
    assert embedder.training
    assert embedder.head.training


def test_a_frozen_batch_norm_still_passes_gradients_on(embedder: Embedder) -> None:
    start_training_mode(embedder, batch_norm="freeze")
    set_trainable(embedder, batch_norm="freeze")
    embedder(torch.rand(4, 3, 32, 32))[:, 0].sum().backward()
    assert {name for name, p in embedder.named_parameters() if p.grad is not None} == EVERYTHING - AFFINE


def test_warm_up_gives_the_trunk_no_gradient(embedder: Embedder) -> None:
    set_trainable(embedder, warming_up=True, warm_up_epochs=1)
    embedder(torch.rand(4, 3, 32, 32))[:, 0].sum().backward()
    assert {name for name, p in embedder.named_parameters() if p.grad is not None} == HEAD


def test_every_kind_of_batch_norm_is_frozen_and_nothing_else() -> None:
    layers = [torch.nn.BatchNorm1d(2), torch.nn.BatchNorm3d(2), torch.nn.SyncBatchNorm(2), torch.nn.Dropout()]
    freeze_statistics(torch.nn.Sequential(*layers).train())
    assert [layer.training for layer in layers] == [False, False, False, True]


def test_batch_norm_of_timm_is_frozen() -> None:
    embedder = create_embedder("efficientnet_lite0", weights="none")
    start_training_mode(embedder, batch_norm="freeze")
    norms = [m for m in embedder.modules() if hasattr(m, "running_mean")]
    assert len(norms) > 40
    assert not any(m.training for m in norms)


@pytest.mark.parametrize("batch_norm", ["train", "freeze", "freeze-all"])
def test_a_frozen_patch_embedding_stays_frozen_when_the_warm_up_ends(batch_norm: str) -> None:
    embedder = create_embedder(
        "vit_tiny_patch16_224", weights="none", image_size=32, pooling="token", freeze_patch_embedding=True
    )
    for warming_up in (True, False):
        set_trainable(embedder, warming_up=warming_up, batch_norm=batch_norm, warm_up_epochs=1)
        assert not any("patch_embed" in name for name in trainable(embedder))
    assert "backbone.network.cls_token" in trainable(embedder)


def test_bad_options_are_refused(embedder: Embedder) -> None:
    with pytest.raises(ValueError, match="batch_norm must be one of .* got 'frozen'"):
        set_trainable(embedder, batch_norm="frozen")
    with pytest.raises(ValueError, match="batch_norm must be one of .* got 'frozen'"):
        start_training_mode(embedder, batch_norm="frozen")
    with pytest.raises(ValueError, match="warming_up needs warm_up_epochs of at least 1, got 0"):
        set_trainable(embedder, warming_up=True)
