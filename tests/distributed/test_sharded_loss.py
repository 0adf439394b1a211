"""A sharded loss is the loss of one process: value and gradients, for every world, law, weight, space and deal."""

import inspect

import pytest
import torch
from cases import errors_in_both_types, placed_proxies, projected_rows, two_steps_and_half_precision

from pfml.distributed import ShardedPotentialFieldLoss
from pfml.distributed.sharded_loss import normal_rows
from pfml.field import ContrastiveLaw, LogarithmicLaw
from pfml.losses import PotentialFieldLoss

WORLDS = [1, 2, 3, 4]
#: Relative errors of the value and of the gradients, by norms, by type.
TOLERANCES = (1e-5, 1e-9)

LOG = {"normalization": "log", "delta": 0.6, "delta_rep": 1.2, "alpha": 6.0}
WIDE = {"delta": 0.3, "delta_rep": 0.9, "alpha": 6.0}
LAWS = {
    "pfml": {},
    "wide repulsion": WIDE,
    "logarithmic": {"potential": LogarithmicLaw()},
    "cpml": {"potential": "cpml"},
    "cpml mirrored": {"potential": ContrastiveLaw(bounded=False)},
    "log": LOG,
    "anchor": {"normalization": "anchor", "alpha": 16.0},
}
#: With labels drawn by lot, about half of the samples of `state_of` are trusted as much.
TRUST = {"trust": 0.9}
FILTERED = {f"{name}, filtered": {**LAWS[name], **TRUST} for name in ("wide repulsion", "log", "anchor")}
FIELDS = {**LAWS, **FILTERED}
OPTIONS = {
    "no proxy attraction": {"proxy_attraction": False},
    "no proxy repulsion": {"proxy_repulsion": False},
    "no proxy pairs": {"proxy_attraction": False, "proxy_repulsion": False},
    "no sample pairs": {"sample_sample": False},
    "weights": {"proxy_attraction": 0.3, "proxy_repulsion": 1.7, "sample_sample": 0.5},
    "free proxies": {"proxy_space": "free"},
    "projected proxies": {"proxy_space": "projected"},
    "samples as they are": {"normalize_embeddings": False},
    "mean over pairs": {"reduction": "pairs"},
    "mean over points": {"reduction": "points"},
}


def assert_as_one_process(world, size, options, spread=0.4, deal="uneven", sizes=()):
    answers = world.run(errors_in_both_types, size, options, spread, deal, sizes)
    for by_type in answers:
        for (value, of_samples, of_proxies, *_), tolerance in zip(by_type, TOLERANCES, strict=True):
            assert max(value, of_samples, of_proxies) <= tolerance
    for by_rank in zip(*answers, strict=True):
        assert len({answer[3] for answer in by_rank}) == 1, "every rank has the same value"


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("field", FIELDS)
def test_value_and_gradients_are_those_of_one_process(world, field, size):
    assert_as_one_process(world, size, FIELDS[field])


@pytest.mark.parametrize("normalization", ["none", "log", "anchor"])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_acts_as_in_one_process(world, option, normalization):
    law = {"none": WIDE, "log": LOG, "anchor": LAWS["anchor"]}[normalization]
    assert_as_one_process(world, 3, {**law, **OPTIONS[option]})


@pytest.mark.parametrize("deal", ["even", "uneven", "empty", "one for all"])
@pytest.mark.parametrize("field", ["wide repulsion", "log", "anchor", *FILTERED])
def test_any_deal_of_the_batch_gives_the_same(world, field, deal):
    assert_as_one_process(world, 4, FIELDS[field], deal=deal)


@pytest.mark.parametrize("law", ["wide repulsion", "log", "anchor"])
@pytest.mark.parametrize(
    "sizes",
    [(3, 1, 9), (2, 1, 3), (5, 0, 11), (1, 5, 6), (6, 4, 0), (4, 3, 1, 2)],
    ids="C{0[0]} M{0[1]} B{0[2]}".format,
)
def test_fewer_charges_than_ranks_and_none_at_all(world, law, sizes):
    assert_as_one_process(world, 4, LAWS[law], sizes=sizes)


@pytest.mark.parametrize("law", ["pfml", "log"])
@pytest.mark.parametrize("spread", [1.0, 0.05, 0.0])
def test_scattered_crowded_and_coincident_charges(world, law, spread):
    assert_as_one_process(world, 3, LAWS[law], spread=spread)


def test_equal_steps_give_equal_bits_and_gradients_keep_their_type(world):
    for first, second, half in world.run(two_steps_and_half_precision, 4):
        assert first == second
        assert half[1] == torch.float16
        assert half[0] == pytest.approx(first[0], rel=0.05)


def parts_of(answers, index):
    return torch.tensor([row for answer in answers for row in answer[index]])


@pytest.mark.parametrize(
    ("init", "space", "classes"),
    [
        *[(init, space, 6) for init in ("normal", "samples", "kmeans") for space in ("normalized", "free")],
        ("kmeans", "normalized", 4),
    ],
)
@pytest.mark.filterwarnings("ignore:2 of 6 classes have no samples")
def test_proxies_start_where_those_of_one_process_start(world, init, space, classes):
    embeddings = torch.randn(60, 5, generator=torch.Generator().manual_seed(2))
    labels = torch.arange(60) % classes
    options = {"proxy_init": init, "proxy_space": space, "proxy_init_norm": 2.0}
    torch.manual_seed(5)
    whole = PotentialFieldLoss(6, 5, proxies_per_class=3, **options)
    answers = world.run(placed_proxies, 4, options, embeddings, labels)
    assert torch.equal(parts_of(answers, 0), whole.proxies.flatten(0, 1))
    whole.initialize_proxies(embeddings, labels, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(parts_of(answers, 1), whole.proxies.detach().flatten(0, 1))
    assert all((refused is None) == (init == "normal") for _, _, refused in answers)


@pytest.mark.parametrize(("total", "dim"), [(3, 2), (1, 20), (700, 3), (33, 17), (321, 16)])
def test_a_draw_in_chunks_is_the_whole_draw(monkeypatch, total, dim):
    monkeypatch.setattr("pfml.distributed.sharded_loss.CHUNK_NUMBERS", 64)
    torch.manual_seed(1)
    whole, after = torch.randn(total, dim), torch.rand(())
    for rows in (slice(0, total), slice(total // 3, total), slice(total, total)):
        torch.manual_seed(1)
        assert torch.equal(normal_rows(total, dim, rows), whole[rows])
        assert torch.rand(()) == after, "the generator is where it would be"


def test_projected_proxies_are_put_back_on_the_sphere_in_training_only(world):
    for as_they_were, projected in world.run(projected_rows, 2):
        assert max(abs(length - 1) for length in as_they_were) > 0.1
        assert projected == pytest.approx([1.0] * len(projected), abs=1e-6)


def test_the_arguments_are_those_of_the_loss_of_one_process():
    whole = inspect.signature(PotentialFieldLoss).parameters
    sharded = inspect.signature(ShardedPotentialFieldLoss).parameters
    assert {*whole} - {*sharded} == {"proxy_sample"}
    assert {*sharded} - {*whole} == {"model_gradients", "group"}
    for name in {*whole} & {*sharded}:
        assert whole[name].default == sharded[name].default
