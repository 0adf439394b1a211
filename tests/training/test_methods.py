import pytest
import torch

from pfml.losses import PotentialFieldLoss, ProxyAnchorLoss
from pfml.training.methods import METHODS, LossConfig, create_loss


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_a_finite_loss_with_a_gradient(name):
    loss = create_loss(LossConfig(name), 3, 8)
    embeddings = torch.randn(6, 8, requires_grad=True)
    value = loss(embeddings, torch.arange(6) % 3)
    value.backward()
    assert torch.isfinite(value)
    assert embeddings.grad.abs().sum() > 0


def test_the_paper_s_text_is_the_default_of_the_loss():
    ours, default = create_loss(LossConfig("pfml"), 3, 8), PotentialFieldLoss(3, 8)
    assert ours.hyperparameters() == default.hyperparameters()


def test_the_preset_is_the_logarithmic_field():
    values = create_loss(LossConfig("pfml-log"), 3, 8).hyperparameters()
    assert values["normalization"] == "log"
    assert (values["law.delta"], values["law.delta_rep"], values["law.alpha"]) == (0.6, 1.2, 6.0)
    assert values["proxy_attraction"] == 0


def test_options_override_what_the_name_stands_for():
    loss = create_loss(LossConfig("pfml-log", {"delta": 0.5, "proxies_per_class": 2}), 3, 8)
    assert loss.hyperparameters()["law.delta"] == 0.5
    assert loss.hyperparameters()["law.delta_rep"] == 1.2
    assert loss.proxies.shape == (3, 2, 8)


def test_proxy_anchor_takes_its_own_options():
    loss = create_loss(LossConfig("proxy-anchor", {"margin": 0.3}), 3, 8)
    assert isinstance(loss, ProxyAnchorLoss)
    assert loss.margin == 0.3


def test_an_unknown_method_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean 'pfml'"):
        LossConfig("pfm")


def test_an_unknown_option_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="got 'detla'; did you mean 'delta'"):
        LossConfig("pfml", {"detla": 0.3})


def test_a_value_of_the_wrong_kind_is_named():
    with pytest.raises(ValueError, match="'alpha': 'abc'"):
        create_loss(LossConfig("pfml", {"alpha": "abc"}), 3, 8)


def test_num_classes_is_no_option():
    with pytest.raises(ValueError, match="num_classes"):
        LossConfig("pfml", {"num_classes": 3})
