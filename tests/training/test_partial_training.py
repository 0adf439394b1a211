"""Parts of a network that train: a frozen trunk on cached features, adapters, rates by layer, mini-batches."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from pfml import Preprocessing, evaluate
from pfml.models import Embedder, create_embedder, load_embedder
from pfml.models.adapters import add_adapters, merge_adapters, merged_state
from pfml.training import BatchConfig, LossConfig, OptimizerConfig, train
from pfml.training.cached_batch import CachedBatch
from pfml.training.optimizer import create_optimizer
from small_data import InterruptAt, few_glyphs, small_config, small_embedder


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))

    def forward(self, tokens):
        return tokens + self.mlp(tokens)


class Tokens(nn.Module):
    """A transformer without attention: patches and two blocks."""

    def __init__(self, width=16):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.Sequential(Block(width), Block(width))

    def forward(self, images):
        return self.blocks(self.patches(images).flatten(2).mT)


def transformer():
    torch.manual_seed(0)
    return Embedder.wrap(Tokens(), Preprocessing(16, 16), embedding_dim=8)


def trained(out, make, config, **more):
    embedder = make()
    torch.manual_seed(4)
    results = train(few_glyphs(), embedder, config, out=out, **more)
    return results, embedder


def equal(first, second):
    return all(torch.equal(value, second[name]) for name, value in first.items())


# --- a frozen trunk


def test_a_frozen_trunk_stays_and_its_features_are_computed_once(tmp_path, monkeypatch):
    def make():
        torch.manual_seed(0)
        return small_embedder()

    embedder = make()
    before = {name: value.clone() for name, value in embedder.state_dict().items()}
    passes = []
    forward = type(embedder.backbone).forward
    monkeypatch.setattr(
        type(embedder.backbone), "forward", lambda self, images: passes.append(len(images)) or forward(self, images)
    )
    results = train(few_glyphs(), embedder, small_config(freeze="trunk", epochs=4), out=tmp_path / "run")
    assert sum(passes) == len(few_glyphs().train) + len(few_glyphs().test)
    after = embedder.state_dict()
    assert equal({name: value for name, value in before.items() if name.startswith("backbone")}, after)
    assert not torch.equal(before["head.linear.weight"], after["head.linear.weight"])
    monkeypatch.undo()
    loaded = load_embedder(tmp_path / "run")
    assert evaluate(loaded, few_glyphs()).as_dict() == pytest.approx(results["last"]["test"], abs=1e-6)


def test_a_frozen_trunk_resumes_to_the_bit(tmp_path):
    config = small_config(freeze="trunk", checkpoint_every=1, head_start="principal")

    def make():
        torch.manual_seed(0)
        return small_embedder()

    _, whole = trained(tmp_path / "whole", make, config)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "parts", make, config, monitor=InterruptAt(5))
    _, resumed = trained(tmp_path / "parts", make, config, resume=True)
    assert equal(whole.state_dict(), resumed.state_dict())


def test_features_take_the_place_of_images():
    embedder = small_embedder().eval()
    images = torch.rand(3, 3, 16, 16)
    features = embedder.features(images)
    assert torch.equal(embedder(features), embedder(images))
    assert embedder.features(features) is features


# --- adapters


def test_adapters_train_in_place_of_the_backbone_and_are_saved_as_an_ordinary_model(tmp_path):
    pytest.importorskip("peft", reason="needs the extra lora")
    config = small_config(lora=2, warm_up_epochs=1, epochs=2)
    plain = transformer().state_dict()
    results, embedder = trained(tmp_path / "run", transformer, config)
    state = embedder.state_dict()
    assert state.keys() == plain.keys()
    loaded = load_embedder(tmp_path / "run", network=Tokens())
    assert equal(loaded.state_dict(), state)
    moved = [name for name in plain if name.startswith("backbone") and not torch.equal(plain[name], state[name])]
    assert moved
    assert all(name.startswith("backbone.network.blocks") and name.endswith("weight") for name in moved)
    for name in moved:
        assert torch.linalg.matrix_rank(state[name] - plain[name], rtol=1e-3) <= 2
    found = evaluate(loaded, few_glyphs()).as_dict()["recall_at_1"]
    assert found == pytest.approx(results["last"]["test"]["recall_at_1"], abs=0.02)


def test_adapters_resume_to_the_bit(tmp_path):
    pytest.importorskip("peft", reason="needs the extra lora")
    config = small_config(lora=2, checkpoint_every=1)
    _, whole = trained(tmp_path / "whole", transformer, config)
    embedder = transformer()
    torch.manual_seed(4)
    with pytest.raises(KeyboardInterrupt):
        train(few_glyphs(), embedder, config, out=tmp_path / "parts", monitor=InterruptAt(5))
    train(few_glyphs(), embedder, config, out=tmp_path / "parts", resume=True)  # the same one, adapters and all
    assert equal(whole.state_dict(), embedder.state_dict())


def test_merged_adapters_are_what_they_were_beside_their_layers():
    pytest.importorskip("peft", reason="needs the extra lora")
    embedder = transformer().eval()
    added = add_adapters(embedder.backbone, 3)
    images = torch.rand(2, 3, 16, 16)
    for parameter in added:
        nn.init.normal_(parameter, std=0.1)
    expected, state = embedder(images), merged_state(embedder)
    merge_adapters(embedder)
    assert torch.allclose(embedder(images), expected, atol=1e-5)
    assert all(torch.allclose(value, state[name], atol=1e-6) for name, value in embedder.state_dict().items())


def test_adapters_need_linear_layers(tmp_path):
    pytest.importorskip("peft", reason="needs the extra lora")
    with pytest.raises(ValueError, match="lora needs a backbone with linear layers"):
        train(few_glyphs(), small_embedder(), small_config(lora=2), out=tmp_path / "run")


# --- rates by layer


@pytest.mark.parametrize(
    ("make", "layers"),
    [
        (transformer, 3),  # patches, two blocks
        (lambda: create_embedder("test_vit", weights="none", embedding_dim=8, image_size=32), 7),
        (small_embedder, 2),
    ],
    ids=["own", "timm", "convnet"],
)
def test_early_layers_move_less(make, layers):
    embedder = make()
    depth = embedder.backbone.parameter_layers()
    assert sorted(map(id, (one for layer in depth for one in layer))) == sorted(map(id, embedder.backbone.parameters()))
    assert len(depth) >= layers
    optimizer = create_optimizer(OptimizerConfig(lr=1.0, layer_decay=0.5), embedder, nn.Identity())
    rates = {id(one): group["lr"] for group in optimizer.param_groups for one in group["params"]}
    for number, layer in enumerate(reversed(depth), start=1):
        assert {rates[id(one)] for one in layer} == {0.5**number}
    assert {rates[id(one)] for one in embedder.head_parameters()} == {1.0}


def test_a_run_with_rates_by_layer_trains_and_resumes(tmp_path):
    config = small_config(optimizer=OptimizerConfig("adamw", lr=1e-3, layer_decay=0.7), checkpoint_every=1)
    _, whole = trained(tmp_path / "whole", transformer, config)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "parts", transformer, config, monitor=InterruptAt(3))
    _, resumed = trained(tmp_path / "parts", transformer, config, resume=True)
    assert equal(whole.state_dict(), resumed.state_dict())


# --- mini-batches


@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
@pytest.mark.parametrize("method", ["pfml-log", "multi-similarity"])
def test_a_step_in_mini_batches_is_the_plain_step(tmp_path, method, autocast):
    loss = LossConfig(method, {"proxies_per_class": 2, "reduction": "points"} if method == "pfml-log" else {})
    sgd = OptimizerConfig("sgd", lr=1e-4, proxy_lr=1e-4)
    config = small_config(epochs=1, loss=loss, batch_norm="freeze-statistics", autocast=autocast, optimizer=sgd)

    def make():
        torch.manual_seed(0)
        return small_embedder()

    plain, expected = trained(tmp_path / "plain", make, config)
    batch = replace(config.batch, mini_batch_size=5)
    pieces, found = trained(tmp_path / "pieces", make, replace(config, batch=batch))
    assert pieces["last"]["loss"] == pytest.approx(plain["last"]["loss"], rel=1e-5 if autocast == "none" else 1e-2)
    start, moved = make().state_dict(), 0
    for name, value in expected.state_dict().items():
        change, difference = (value - start[name]).float().norm(), (found.state_dict()[name] - value).float()
        assert difference.abs().max() <= (1e-6 if autocast == "none" else 0.1 * change + 1e-6), name
        moved += int(not torch.equal(value, start[name]))
    assert moved > 3


def test_gradients_of_mini_batches_are_those_of_the_batch_with_their_own_dropout():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    images = torch.randn(10, 4, dtype=torch.float64)

    def gradients(size):
        network.zero_grad()
        batch = CachedBatch(network, images, size)
        (batch.outputs @ batch.outputs.T).exp().sum().backward()
        batch.backward()
        return [parameter.grad.clone() for parameter in network.parameters()]

    expected = gradients(None)
    for size in (1, 3, 10, 99):
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(gradients(size), expected, strict=True))
    dropping = nn.Sequential(nn.Dropout(0.5))
    ones = torch.ones(6, 50, requires_grad=True)
    batch = CachedBatch(dropping, ones, 2)
    batch.outputs.sum().backward()
    state = torch.get_rng_state()
    batch.backward()
    assert torch.equal(ones.grad, batch.outputs.detach())  # 2 where it was kept, else 0
    assert torch.equal(torch.get_rng_state(), state)


# --- what makes no sense


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"freeze": "head"}, "freeze must be none or trunk"),
        ({"freeze": "trunk", "lora": 2}, "choose one"),
        ({"lora": -1}, "lora must be >= 0"),
        ({"optimizer": {"layer_decay": 0.0}}, r"layer_decay must lie in \(0, 1\]"),
        ({"batch": {"mini_batch_size": 0}}, "mini_batch_size must be >= 1"),
    ],
)
def test_options_without_meaning_are_refused(changes, message):
    groups = {"optimizer": OptimizerConfig, "batch": BatchConfig}
    with pytest.raises(ValueError, match=message):
        small_config(**{name: groups[name](**value) if name in groups else value for name, value in changes.items()})


def test_what_a_network_cannot_do_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"set model\.embedding_dim"):
        train(few_glyphs(), small_embedder(embedding_dim=None), small_config(freeze="trunk"), out=tmp_path / "run")
    config = small_config(batch=BatchConfig(32, 4, mini_batch_size=8))
    with pytest.raises(ValueError, match="choose batch_norm freeze"):
        train(few_glyphs(), small_embedder(), config, out=tmp_path / "run")
