"""What goes wrong on one rank is raised on all of them, and none of them waits for ever."""

import pytest
import torch
from cases import errors_of_construction, errors_of_forward, forward_without_rank_1

from pfml.distributed import ShardedPotentialFieldLoss


def test_without_a_process_group_the_error_says_how_to_make_one():
    with pytest.raises(RuntimeError, match="torchrun .*init_process_group"):
        ShardedPotentialFieldLoss(4, 3)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"delta": 0.3}, ["law.delta", "[0.2, 0.3, 0.2]"]),
        ({"num_classes": 5}, ["num_classes", "[4, 5, 4]"]),
        ({"proxy_init": "kmeans"}, ["proxy_init", "kmeans"]),
        ({"model_gradients": "summed"}, ["model_gradients"]),
        ({"proxy_init_norm": 1.0}, ["proxy_init_norm"]),
        ({"trust": 0.3}, ["trust", "[None, 0.3, None]"]),
    ],
)
def test_other_hyperparameters_on_one_rank_are_named_on_all(world, odd, words):
    answers = world.run(errors_of_construction, 3, [{}, odd, {}])
    assert len({message for message, _ in answers}) == 1
    kind, text = answers[0][0]
    assert kind == "ValueError"
    assert all(word in text for word in ["same hyper-parameters on all ranks", *words])
    assert len({value for _, value in answers}) == 1


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        ({"delta": -1.0}, "ValueError", "delta must be a positive number"),
        ({"proxies_per_class": -1}, "ValueError", "proxies_per_class must be an integer >= 0, got -1"),
        ({"backend": "dense"}, "ValueError", "backend of a sharded loss must be 'auto' or 'tiled', got 'dense'"),
        ({"model_gradients": "mean"}, "ValueError", "model_gradients must be one of"),
        ({"trust": 1.5}, "ValueError", "trust must lie in [0, 1], got 1.5"),
        ({"trust": 0.3, "proxies_per_class": 0}, "ValueError", "trust needs proxies, which tell what fits"),
        ({"trust": 0.3, "potential": "cpml"}, "ValueError", "trust needs an attraction that decays"),
        ({"normalize_embeddings": "no"}, "TypeError", "normalize_embeddings must be True or False"),
    ],
)
def test_a_wrong_option_on_one_rank_is_raised_on_all(world, wrong, kind, text):
    answers = world.run(errors_of_construction, 3, [{}, {}, wrong])
    for (got_kind, got_text), value in answers:
        assert got_kind == kind
        assert got_text.startswith(f"rank 2: {text}")
        assert value == answers[0][1]


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("label", "ValueError", "rank 1: labels must lie in [0, 4), got 7 at index 3"),
        ("nan", "ValueError", "rank 1: embeddings must be finite, got NaN or Inf in 1 rows: 2"),
        ("shape", "ValueError", "rank 1: embeddings must be (batch, 3), got shape (5, 2)"),
        ("float labels", "TypeError", "rank 1: labels must be integers"),
        ("proxies", "ValueError", "rank 1: proxies must be finite, got NaN or Inf in 1 classes: 2"),
        ("type", "TypeError", "embeddings and proxies must give one type on all ranks"),
        ("other loss", "RuntimeError", "all ranks must call the same loss"),
    ],
)
def test_a_fault_of_one_rank_is_raised_on_all_and_the_next_step_works(world, fault, kind, text):
    answers = world.run(errors_of_forward, 3, fault, [1])
    for (got_kind, got_text), value in answers:
        assert (got_kind, got_text[: len(text)]) == (kind, text)
        assert value == answers[0][1]
    assert len({message for message, _ in answers}) == 1


def test_faults_of_several_ranks_are_one_error(world):
    answers = world.run(errors_of_forward, 4, "label", [1, 3])
    assert {message for message, _ in answers} == {
        ("ValueError", "rank 1: labels must lie in [0, 4), got 7 at index 3 (and 1 more of 4 ranks)")
    }


def test_a_fault_in_a_world_of_one(world):
    ((message, value),) = world.run(errors_of_forward, 1, "label", [0])
    assert message == ("ValueError", "rank 0: labels must lie in [0, 4), got 7 at index 3")
    assert torch.isfinite(torch.tensor(value))


def test_a_rank_whose_peer_does_not_come_is_told_when_the_timeout_of_the_group_ends(world):
    world.run(errors_of_construction, 2, [{}, {}])  # both ranks have imported what a loss needs
    message, _ = world.run(forward_without_rank_1, "hasty")
    assert message is not None
    assert message[0] == "LostRankError"
