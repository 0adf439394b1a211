"""Training over several ranks is the training of one process."""

import pytest
import torch
from worlds import LARGEST

from pfml.data import Augmentation
from pfml.models import load_embedder
from pfml.runs.folder import RunFolder
from pfml.search import ModelIdentity
from pfml.training import BatchConfig, LossConfig, OptimizerConfig, load_loss
from runs import (
    choices,
    evaluation,
    faulty_training,
    outcome,
    refusal,
    refusal_of_other_task,
    training,
    training_on_known_classes,
    training_with_choice,
    training_with_turned_directions,
    warned_training,
)
from small_data import small_embedder


def assert_same_run(folder, expected, *, error=1e-4):
    """The same files, and tensors that differ by so much of their norm."""
    (tensors, state), (expected_tensors, expected_state) = outcome(folder), outcome(expected)
    assert tensors.keys() == expected_tensors.keys()
    for name, value in expected_tensors.items():
        assert tensors[name].shape == value.shape
        assert tensors[name].dtype == value.dtype
        if name.startswith("optimizer/"):  # moments of gradients, which are differences of large numbers
            assert_alike(name, tensors[name], value, error=100 * error, least=1e-9)
        else:
            assert_alike(name, tensors[name], value, error=error)
    assert state["step"] == expected_state["step"]
    for mine, theirs in zip(state["history"], expected_state["history"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=error)


def assert_alike(name, value, expected, *, error=1e-4, least=0.1):
    """Tensors that differ by so much of their norm, or of `least`, since biases start at 0."""
    share = (value.double() - expected.double()).norm() / expected.double().norm().clamp(min=least)
    assert share <= error, f"{name} differs by {share} of its norm"


#: Embeddings that have learned little: nearly half of each batch is left out.
TRUST = {"loss": LossConfig("pfml-log", {"proxies_per_class": 3, "reduction": "points", "trust": 0.9})}
CASES = {
    "pfml": {},
    "warm-up, average, log": {
        "warm_up_epochs": 1,
        "average": 0.5,
        "loss": LossConfig("pfml-log", {"proxies_per_class": 2, "reduction": "points"}),
    },
    "kmeans, whitened": {
        "head_start": "whitened",
        "loss": LossConfig("pfml", {"proxies_per_class": 3, "proxy_init": "kmeans", "reduction": "points"}),
    },
    "trust": TRUST,
    "proxy anchor": {"loss": LossConfig("proxy-anchor"), "optimizer": OptimizerConfig("sgd", lr=1e-3, momentum=0.9)},
    "hist": {"loss": LossConfig("hist", {"hidden_dim": 16})},
    "mini-batches, transforms, rates by layer": {
        "batch": BatchConfig(size=31, samples_per_class=0, mini_batch_size=4),
        "augmentation": Augmentation(color_jitter=(0.4, 0.4, 0.4, 0.1), rotation=15, rand_augment=1, erasing=0.5),
        "optimizer": OptimizerConfig("adamw", lr=1e-3, eps=1e-2, clip_norm=0.5, layer_decay=0.7),
    },
    "frozen trunk": {"freeze": "trunk"},
    "float16": {"autocast": "float16", "epochs": 1},
    "margin": {"loss": LossConfig("margin"), "optimizer": OptimizerConfig("rmsprop", lr=1e-4, clip_value=0.01)},
    "mixed crops": {"loss": LossConfig("proxy-anchor-hse"), "epochs": 1},
    "produced embeddings": {"loss": LossConfig("multi-similarity-das"), "batch": BatchConfig(28, 4), "epochs": 1},
}
SLOW_CASES = ("margin", "mixed crops", "produced embeddings")


@pytest.mark.parametrize(
    ("case", "size"),
    [
        ("pfml", 2),
        *((case, 3) for case in CASES if case not in SLOW_CASES),
        *(pytest.param(case, 3, marks=pytest.mark.slow) for case in SLOW_CASES),
    ],
)
def test_the_steps_are_those_of_one_process(world, tmp_path, case, size):
    expected = training(None, tmp_path / "one", CASES[case])
    answers = world.run(training, size, tmp_path / "ranks", CASES[case])
    assert_same_run(tmp_path / "ranks", tmp_path / "one", error=1e-2 if case == "float16" else 1e-4)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0].keys() == expected.keys()
    if "alignment" in expected:
        assert answers[0]["alignment"] == pytest.approx(expected["alignment"], rel=1e-3)


def test_held_out_images_of_known_classes_are_searched_alike_by_ranks(world, tmp_path):
    expected = training_on_known_classes(None, tmp_path / "one")
    answers = world.run(training_on_known_classes, 2, tmp_path / "ranks")
    assert_same_run(tmp_path / "ranks", tmp_path / "one")
    assert all(answer == answers[0] for answer in answers)
    assert answers[0]["protocol"] == "images"
    assert answers[0]["last"]["test"]["num_queries"] == expected["last"]["test"]["num_queries"] > 0


def test_the_steps_of_a_student_are_those_of_one_process(world, tmp_path):
    teachers = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        small_embedder(image_size=32).save(tmp_path / f"teacher {seed}")
        teachers.append(str(tmp_path / f"teacher {seed}"))
    student = {"loss": LossConfig("relaxed-contrastive"), "teachers": tuple(teachers), "epochs": 1}
    training(None, tmp_path / "one", student)
    world.run(training, 3, tmp_path / "three", student)
    assert_same_run(tmp_path / "three", tmp_path / "one")
    reduced = student | {"teacher_dims": 4}
    training(None, tmp_path / "reduced", reduced)
    world.run(training_with_turned_directions, 2, tmp_path / "turned", reduced)
    assert_same_run(tmp_path / "turned", tmp_path / "reduced")


@pytest.mark.parametrize("case", ["pfml", pytest.param("trust", marks=pytest.mark.slow)])
def test_a_run_goes_from_4_ranks_to_2_to_1_and_from_1_to_4(world, tmp_path, case):
    changes = CASES[case]
    training(None, tmp_path / "one", changes)
    assert world.run(training, 4, tmp_path / "down", changes, False, 3) == [None] * 4
    assert outcome(tmp_path / "down")[1]["step"] == 3
    assert world.run(training, 2, tmp_path / "down", changes, True, 2) == [None] * 2
    assert outcome(tmp_path / "down")[1]["step"] == 5
    training(None, tmp_path / "down", changes, resume=True)
    assert_same_run(tmp_path / "down", tmp_path / "one")

    training(None, tmp_path / "up", changes, interrupt_at=3)
    world.run(training, 4, tmp_path / "up", changes, True)
    assert_same_run(tmp_path / "up", tmp_path / "one")
    steps = [entry["step"] for entry in RunFolder(tmp_path / "up").entries("step")]
    assert steps == list(range(1, 9))


def test_a_run_that_goes_on_with_as_many_ranks_ends_with_the_same_bits(world, tmp_path):
    world.run(training, 3, tmp_path / "whole", {})
    world.run(training, 3, tmp_path / "broken", {}, False, 5)
    world.run(training, 3, tmp_path / "broken", {}, True)
    whole, broken = outcome(tmp_path / "whole")[0], outcome(tmp_path / "broken")[0]
    assert whole.keys() == broken.keys()
    assert all(torch.equal(value, broken[name]) for name, value in whole.items())


@pytest.mark.parametrize("case", ["pfml", "proxy anchor"])
def test_the_model_is_that_of_the_epoch_that_validation_chose_on_ranks_too(world, tmp_path, case):
    training_with_choice(None, tmp_path / "one", CASES[case])
    world.run(training_with_choice, 3, tmp_path / "ranks", CASES[case], False, 10)
    digests = world.run(training_with_choice, 2, tmp_path / "ranks", CASES[case], True)
    ours, theirs = tmp_path / "ranks", tmp_path / "one"
    assert load_embedder(ours).trained_on.epoch == 1
    assert set(digests) == {ModelIdentity.of(load_embedder(ours)).digest}, "every rank is left with the model"
    for mine, expected in (
        (load_embedder(ours), load_embedder(theirs)),
        (load_embedder(ours / "model-last"), load_embedder(theirs / "model-last")),
        (load_loss(ours), load_loss(theirs)),
    ):
        for name, value in expected.state_dict().items():
            assert_alike(name, mine.state_dict()[name], value, error=1e-3)


@pytest.mark.parametrize("batch_size", [7, 50])
def test_embeddings_and_metrics_are_those_of_one_process_to_the_bit(world, batch_size):
    points, metrics = evaluation(None, batch_size)
    for size in (2, LARGEST):  # 64 images are 2 batches of 50: two of four ranks have none
        for got_points, got_metrics in world.run(evaluation, size, batch_size):
            assert torch.equal(got_points, points)
            assert got_metrics == metrics


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": LossConfig("pfml", {"proxy_sample": 4, "proxies_per_class": 2})}, "proxy_sample must be left out"),
        ({"batch": BatchConfig(2, 0)}, "batch.size must be at least 1 for each of 3 ranks, got 2"),
        ({"loss": LossConfig("pfml", {"backend": "dense"})}, "backend of a sharded loss must be"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused_by_all_and_leaves_no_folder(world, tmp_path, changes, words):
    for kind, text in world.run(refusal, 3, tmp_path / "run", changes):
        assert kind == "ValueError"
        assert words in text
    assert not (tmp_path / "run").exists()


def test_ranks_that_would_train_otherwise_are_refused(world, tmp_path):
    for kind, text in world.run(refusal_of_other_task, 3, tmp_path / "run"):
        assert (kind, text) == ("ValueError", "all ranks must train alike, but rank 2 differs from rank 0 in ['seed']")


def test_a_folder_that_holds_a_run_is_refused_by_all_ranks(world, tmp_path):
    training(None, tmp_path / "run", {"epochs": 1})
    for kind, text in world.run(refusal, 2, tmp_path / "run", {}):
        assert kind == "OSError"
        assert "already holds a run" in text


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("image", "ValueError", "rank 1: photo 7 cannot be read"),
        ("memory", "RuntimeError", "rank 1: MemoryError"),  # which says nothing itself
        ("network", "NonFiniteLossError", "at step 2 (epoch 1, batch 3), nothing was updated; its 31 images"),
        ("disk", "OSError", "rank 0: no space left"),
    ],
)
def test_a_fault_of_one_rank_ends_the_run_on_all(world, tmp_path, fault, kind, words):
    for got_kind, text in world.run(faulty_training, 3, tmp_path / "run", fault):
        assert got_kind == kind
        assert words in text
    assert (tmp_path / "run" / "failed_batch.json").exists() == (fault == "network")


def test_a_collapse_is_said_once(world, tmp_path):
    heard = world.run(warned_training, 3, tmp_path / "run")
    assert [len(texts) for texts in heard] == [1, 0, 0]


def test_each_rank_draws_what_its_network_drops_and_all_draw_the_same_for_a_loss(world):
    dropped, common = zip(*world.run(choices, 3), strict=True)
    assert len(set(dropped)) == 3
    assert len(set(common)) == 1
    assert world.run(choices, 3) == list(zip(dropped, common, strict=True))
