"""Networks of one's own: wrapped, saved, loaded, and what is refused."""

import sys
import textwrap

import pytest
import torch
from torch import nn

from pfml.data import Preprocessing
from pfml.models import Embedder, EmbedderConfig, create_embedder, load_embedder
from pfml.own_code import TRUST, UntrustedCodeError, is_reference, load_reference, trust

SMALL = Preprocessing(20, 16)


def network():
    return nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Returning(nn.Module):
    """Gives whatever it was told to."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.layer = nn.Linear(1, 1)

    def forward(self, images):
        return self.what(images)


@pytest.mark.parametrize(
    ("output", "features"),
    [
        (lambda x: x.mean((2, 3)), 3),
        (lambda x: x[:, :2], 2),
        (lambda x: x.flatten(2).mT, 3),
    ],
    ids=["vectors", "map", "tokens"],
)
def test_vectors_maps_and_tokens_are_pooled_alike(output, features):
    embedder = Embedder.wrap(Returning(output), SMALL).eval()
    images = torch.rand(4, 3, 16, 16)
    pooled = SMALL.normalize(images).mean((2, 3))[:, :features]
    assert embedder.embedding_dim == features
    assert torch.allclose(embedder(images), nn.functional.normalize(pooled), atol=1e-6)


def test_a_wrapped_network_is_the_same_object_in_the_mode_that_it_was_in():
    mine = network().train()
    mine[1].eval()
    embedder = Embedder.wrap(mine, SMALL, embedding_dim=5)
    assert embedder.backbone.network is mine
    assert [part.training for part in mine] == [True, False, True, True, True]
    assert len(embedder.head_parameters()) == 2
    assert {id(one) for one in embedder.backbone_parameters()} == {id(one) for one in mine.parameters()}
    assert embedder(torch.rand(2, 3, 16, 16)).shape == (2, 5)


def test_a_saved_network_is_loaded_into_one_that_is_given(tmp_path):
    embedder = Embedder.wrap(network(), SMALL, embedding_dim=5).eval()
    embedder.save(tmp_path)
    loaded = load_embedder(tmp_path, network=network())
    assert loaded.preprocessing == SMALL
    images = [torch.rand(3, 30, 40)]
    assert torch.equal(loaded.encode(images), embedder.encode(images))


def test_no_code_is_run_that_a_file_names(tmp_path):
    Embedder.wrap(network(), SMALL).save(tmp_path)
    with pytest.raises(UntrustedCodeError, match=r"load_embedder\(folder, network=\.\.\.\).*PFML_TRUST"):
        load_embedder(tmp_path)
    create_embedder("convnet", embedding_dim=4).save(tmp_path / "convnet")
    with pytest.raises(ValueError, match="needs no network"):
        load_embedder(tmp_path / "convnet", network=network())


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module with networks, in the working directory."""
    (tmp_path / "nets_of_mine.py").write_text(
        textwrap.dedent("""
            import torch
            from torch import nn
            from pfml.data import Preprocessing

            class Net(nn.Module):
                def __init__(self, width=6):
                    super().__init__()
                    self.layer = nn.Conv2d(3, width, 3)

                def forward(self, images):
                    return self.layer(images)

            def wide():
                return Net(9), Preprocessing(24, 24)

            def sized(width):
                return Net(width)

            def nothing():
                return "no network"
        """)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "nets_of_mine"
    sys.modules.pop("nets_of_mine", None)


def test_a_named_network_is_made_where_its_module_is_trusted(own_module, tmp_path, monkeypatch):
    name = f"{own_module}:wide"
    with pytest.raises(UntrustedCodeError, match="nets_of_mine"):
        create_embedder(name, embedding_dim=4)
    assert own_module not in sys.modules
    monkeypatch.setenv(TRUST, f"other,{own_module}")
    embedder = create_embedder(name, embedding_dim=4).eval()
    assert embedder.preprocessing.crop == 24
    assert embedder.head.num_features == 9
    assert create_embedder(name, embedding_dim=4, image_size=12).preprocessing.crop == 12
    embedder.save(tmp_path / "model")
    images = [torch.rand(3, 30, 40)]
    assert torch.equal(load_embedder(tmp_path / "model").encode(images), embedder.encode(images))


def test_an_instance_of_a_class_without_arguments_is_loaded_by_name(own_module, tmp_path, monkeypatch):
    monkeypatch.setenv(TRUST, own_module)
    net = load_reference(f"{own_module}:Net")()
    Embedder.wrap(net, SMALL).save(tmp_path / "model")
    loaded = load_embedder(tmp_path / "model")
    assert torch.equal(loaded.backbone.network.layer.weight, net.layer.weight)
    assert loaded.preprocessing == SMALL


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sized", "called without arguments.*width"),
        ("nothing", "must return a torch.nn.Module.*got str"),
        ("missing", "has no missing"),
    ],
)
def test_what_a_name_cannot_make_is_said(own_module, monkeypatch, name, message):
    monkeypatch.setenv(TRUST, own_module)
    with pytest.raises((ValueError, TypeError), match=message):
        create_embedder(f"{own_module}:{name}")


def test_trust_is_for_the_module_that_was_named():
    trust("no_such_module_of_mine:create")
    with pytest.raises(ValueError, match=r"no_such_module_of_mine\.py"):
        load_reference("no_such_module_of_mine:create")
    with pytest.raises(UntrustedCodeError):
        load_reference("no_such_module_of_mine.inner:create")


def test_names_of_code_are_told_from_names_of_models():
    assert is_reference("a.b:c")
    assert not any(map(is_reference, ["resnet50", "hf-hub:timm/resnet50", "C:\\nets", ":x", "x:"]))
    assert EmbedderConfig("a.b:c").backbone == "a.b:c"


class WithExtraState(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

    def forward(self, images):
        return super().forward(images.mean((2, 3)))

    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        pass


class Forgetful(WithExtraState):
    def get_extra_state(self):
        return torch.zeros(1)

    def state_dict(self, *args, **options):
        return {"bias": self.bias}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (WithExtraState, "'_extra_state', which is dict and no tensor"),
        (Forgetful, "leaves out the parameter 'weight'"),
        (lambda: Returning(lambda x: (x.mean((2, 3)),)), "must return a tensor, got tuple"),
        (lambda: Returning(lambda x: x.mean()), r"got torch.float32 of shape \(\) for 2 images"),
        (lambda: Returning(lambda x: x.mean((2, 3)).long()), "got torch.int64"),
        (lambda: nn.Linear(5, 5), r"must take images \(B, 3, 16, 16\).*got RuntimeError"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 2, device="meta")), "must take images|meta"),
        (lambda: "resnet50", "must be a torch.nn.Module, got str"),
    ],
)
def test_networks_that_cannot_be_used_or_saved_are_refused_at_once(made, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Embedder.wrap(made(), SMALL)


def test_lazy_layers_get_their_size():
    embedder = Embedder.wrap(nn.Sequential(nn.Flatten(), nn.LazyLinear(4)), SMALL)
    assert embedder.embedding_dim == 4
