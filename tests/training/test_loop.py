import json
from dataclasses import replace

import pytest
import torch

from pfml.data import RetrievalData, SeenClassError, with_validation
from pfml.evaluation import embed, evaluate, retrieval_metrics
from pfml.models import create_embedder, load_embedder
from pfml.runs.checkpoint import has_checkpoint, load_checkpoint
from pfml.runs.folder import RunFolder
from pfml.runs.saved_loss import load_loss
from pfml.training import BatchConfig, LossConfig, Monitor, NonFiniteLossError, OptimizerConfig, ScheduleConfig, train
from small_data import InterruptAt, few_glyphs, small_config, small_embedder


def run(out, *, resume=False, monitor=None, data=None, embedder=None, **changes):
    torch.manual_seed(1)
    embedder = embedder or small_embedder()
    return train(data or few_glyphs(), embedder, small_config(**changes), out=out, resume=resume, monitor=monitor)


#: Two steps and one evaluation.
SHORT = {"epochs": 1, "batch": BatchConfig(32, 4, per_epoch=2)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An epoch of four steps: the folder of the run, its results, and the embedder that was trained."""
    torch.manual_seed(1)
    folder, embedder = tmp_path_factory.mktemp("trained") / "run", small_embedder()
    return folder, run(folder, embedder=embedder, epochs=1), embedder


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The folder of a run of two steps."""
    run(folder := tmp_path_factory.mktemp("short") / "run", **SHORT)
    return folder


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """The folder of a run that was stopped after its first step; tests must not resume it."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    with pytest.raises(KeyboardInterrupt):
        run(folder, monitor=InterruptAt(1))
    return folder


def outcome(folder):
    """Everything a run ends with, apart from times."""
    tensors, state = load_checkpoint(folder / "checkpoints")
    for entry in state["history"]:
        del entry["images_per_second"]
    return tensors, state


@pytest.mark.parametrize("name", ["pfml", "pfml-log", "proxy-anchor"])
def test_training_separates_the_classes_it_trains_on(tmp_path, name):
    def fit(embedder):
        return retrieval_metrics(embed(embedder, few_glyphs().train), few_glyphs().train.labels).map_at_r

    torch.manual_seed(1)
    embedder = small_embedder(image_size=32)
    before = fit(embedder)
    options = {} if name == "proxy-anchor" else {"proxies_per_class": 2}
    run(tmp_path / "run", embedder=embedder, epochs=6, evaluate_every=6, loss=LossConfig(name, options))
    assert fit(embedder) > 1.5 * before


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path, short):
    for seed in (0, 1):
        run(tmp_path / str(seed), seed=seed, **SHORT)
    assert torch.equal(learned(tmp_path / "0"), learned(short))
    assert not torch.equal(learned(tmp_path / "1"), learned(short))


def test_training_leaves_the_caller_s_random_numbers_alone(tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    train(few_glyphs(), small_embedder_without_draws(), small_config(**SHORT), out=tmp_path / "run")
    assert torch.equal(torch.rand(3), expected)


def small_embedder_without_draws():
    with torch.random.fork_rng():
        return small_embedder()


def test_a_checkpoint_can_be_saved_every_few_steps(tmp_path):
    steps = []

    class Watch(Monitor):
        def step(self, *_):
            folder = tmp_path / "run" / "checkpoints"
            steps.append(load_checkpoint(folder)[1]["step"] if has_checkpoint(folder) else 0)

    run(tmp_path / "run", checkpoint_every=3, epochs=2, monitor=Watch())
    assert steps == [0, 0, 0, 3, 4, 4, 6, 6]


def test_a_folder_that_holds_a_run_is_not_overwritten(trained):
    with pytest.raises(FileExistsError, match="already holds a run"):
        run(trained[0], epochs=1)


def test_a_run_resumes_only_with_the_configuration_it_started_with(interrupted):
    with pytest.raises(ValueError, match="configuration it started with, got seed: it was 0, now 5"):
        run(interrupted, resume=True, seed=5)


def test_a_run_resumes_only_with_the_classes_it_started_with(interrupted):
    with pytest.raises(ValueError, match="was trained on 8 classes"):
        run(interrupted, resume=True, data=with_validation(few_glyphs(), "half"), batch=BatchConfig(16, 4))


def test_a_run_resumes_only_with_the_labels_it_started_with(interrupted):
    other = few_glyphs().train.labels.flip(0)
    data = replace(few_glyphs(), train=few_glyphs().train.with_labels(other))
    with pytest.raises(ValueError, match="other images or labels"):
        run(interrupted, resume=True, data=data)


def test_a_run_resumes_only_with_the_model_it_started_with(interrupted):
    with pytest.raises(ValueError, match="'pooling': 'avg\\+max'.*'pooling': 'max'"):
        run(interrupted, resume=True, embedder=small_embedder(pooling="max"))


def test_a_run_without_a_checkpoint_resumes_at_its_first_step(tmp_path, short):
    class CrashAt(Monitor):
        def step(self, *_):
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        run(tmp_path / "broken", monitor=CrashAt(), **SHORT)
    run(tmp_path / "broken", resume=True, **SHORT)
    assert torch.equal(learned(short), learned(tmp_path / "broken"))


def test_data_on_which_nothing_can_be_found_are_refused_before_training(tmp_path):
    lonely = few_glyphs().test.subset([0, 16, 32, 48])
    with pytest.raises(ValueError, match="no test image has another image of its class"):
        run(tmp_path / "run", data=replace(few_glyphs(), test=lonely))


def test_what_an_embedder_learned_before_is_not_forgotten(tmp_path, trained):
    swapped = RetrievalData("swapped", train=few_glyphs().test, test=few_glyphs().train)
    with pytest.raises(SeenClassError, match="LATIN CAPITAL LETTER A"):
        run(tmp_path / "second", embedder=trained[2], epochs=1, data=swapped, batch=BatchConfig(16, 4))


def test_an_embedder_is_left_ready_for_use(trained):
    assert not trained[2].training


def test_a_loss_that_is_not_finite_stops_the_run_before_the_update(tmp_path, monkeypatch):
    embedder = small_embedder()
    before = {name: value.clone() for name, value in embedder.state_dict().items()}
    monkeypatch.setattr(
        "pfml.losses.ProxyAnchorLoss.forward", lambda self, embeddings, labels: embeddings.sum() * torch.inf
    )
    with pytest.raises(NonFiniteLossError, match=r"at step 0 \(epoch 1, batch 1\), nothing was updated"):
        run(tmp_path / "run", embedder=embedder, loss=LossConfig("proxy-anchor"), batch_norm="freeze")
    assert all(torch.equal(value, before[name]) for name, value in embedder.state_dict().items())
    record = json.loads((tmp_path / "run" / "failed_batch.json").read_text())
    assert len(record["images"]) == 32
    assert all("DejaVu" in name or "STIX" in name for name in record["images"])


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_update(tmp_path):
    torch.manual_seed(1)
    embedder = small_embedder()
    embedder.head.linear.weight.register_hook(lambda gradient: gradient * torch.nan)
    before = embedder.head.linear.weight.detach().clone()
    with pytest.raises(NonFiniteLossError, match="the norm of the gradient is nan at step 0"):
        run(tmp_path / "run", embedder=embedder)
    assert torch.equal(embedder.head.linear.weight, before)


def test_embeddings_that_are_not_finite_stop_the_run_with_the_batch_named(tmp_path):
    embedder = small_embedder()
    with torch.no_grad():
        embedder.head.linear.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteLossError, match="embeddings must be finite.*at step 0"):
        run(tmp_path / "run", embedder=embedder)


def test_only_head_and_proxies_train_during_warm_up(tmp_path):
    torch.manual_seed(1)
    embedder = small_embedder()
    before = {name: value.clone() for name, value in embedder.named_parameters()}
    run(tmp_path / "run", embedder=embedder, warm_up_epochs=1, **SHORT)
    for name, value in embedder.named_parameters():
        assert torch.equal(value, before[name]) == name.startswith("backbone"), name


@pytest.mark.parametrize(
    ("batch_norm", "moved"), [("train", True), ("freeze-statistics", False), ("freeze", False), ("freeze-all", False)]
)
def test_statistics_of_batch_norm_move_only_if_they_may(tmp_path, batch_norm, moved):
    torch.manual_seed(1)
    embedder = small_embedder()
    layer = next(layer for layer in embedder.modules() if isinstance(layer, torch.nn.BatchNorm2d))
    before = layer.running_mean.clone()
    run(tmp_path / "run", embedder=embedder, batch_norm=batch_norm, **SHORT)
    assert torch.equal(layer.running_mean, before) != moved


def test_a_warm_up_may_come_after_epochs_of_the_whole_model(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("pfml.training.loop.set_trainable", lambda embedder, warming_up, **_: seen.append(warming_up))
    short = BatchConfig(32, 4, per_epoch=1)
    run(tmp_path / "run", epochs=4, evaluate_every=4, batch=short, warm_up_epochs=1, warm_up_after=1)
    assert seen == [False, True, False, False]
    with pytest.raises(ValueError, match="warm_up_after needs warm_up_epochs of at least 1, got 1 and 0"):
        small_config(warm_up_epochs=0, warm_up_after=1)


def learned(folder):
    return outcome(folder)[0]["embedder/head.linear.weight"]


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": OptimizerConfig("adam", lr=1e-3, weight_decay=0.1)},
        {"optimizer": OptimizerConfig("adamw", lr=1e-3, head_lr=1e-2)},
        {"optimizer": OptimizerConfig("adamw", lr=1e-3, proxy_lr=1e-3)},
        {"optimizer": OptimizerConfig("adamw", lr=1e-3, eps=1.0)},
        {"optimizer": OptimizerConfig("adamw", lr=1e-3, clip_value=1e-9)},
        {"optimizer": OptimizerConfig("adamw", lr=1e-3, clip_norm=1e-9)},
        {"schedule": ScheduleConfig("cosine")},
        {"autocast": "bfloat16"},
        {"batch": BatchConfig(32, 0, per_epoch=2)},
        {"loss": LossConfig("pfml", {"proxies_per_class": 2, "proxy_init": "samples"})},
    ],
    ids=str,
)
def test_every_option_of_the_optimization_changes_what_is_learned(tmp_path, short, changes):
    run(tmp_path / "changed", **{**SHORT, **changes})
    assert not torch.equal(learned(short), learned(tmp_path / "changed"))


def test_deterministic_mode_ends_with_the_run(tmp_path):
    seen = []

    class Watch(Monitor):
        def step(self, *_):
            seen.append(torch.are_deterministic_algorithms_enabled())

    run(tmp_path / "run", deterministic=True, monitor=Watch(), **SHORT)
    assert seen == [True, True]
    assert not torch.are_deterministic_algorithms_enabled()


def test_float16_with_a_scaler_keeps_parameters_finite(tmp_path):
    run(tmp_path / "run", autocast="float16", **SHORT)
    assert torch.isfinite(learned(tmp_path / "run")).all()


def test_results_name_the_last_the_best_and_the_chosen_epoch(tmp_path):
    results = run(tmp_path / "run", data=with_validation(few_glyphs(), "half"), batch=BatchConfig(16, 4), epochs=3)
    history = RunFolder(tmp_path / "run").entries("evaluation")
    assert results["last"]["epoch"] == 3
    assert results["best_on_test"]["test"]["recall_at_1"] == max(e["test"]["recall_at_1"] for e in history)
    chosen = results["validation_selected"]
    assert chosen["validation"]["recall_at_1"] == max(e["validation"]["recall_at_1"] for e in history)
    assert RunFolder(tmp_path / "run").read_results() == results
    assert load_embedder(tmp_path / "run").trained_on.class_names == few_glyphs().train.class_names[:4]


def test_the_model_may_see_larger_crops_than_it_was_trained_on(tmp_path):
    results = run(tmp_path / "plain", **SHORT)
    larger = run(tmp_path / "larger", test_image_size=20, **SHORT)
    plain, model = (load_embedder(tmp_path / name) for name in ("plain", "larger"))
    assert (model.preprocessing.crop, model.preprocessing.resize, model.config.image_size) == (20, 20, 20)
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=0, msg="training saw what it sees")
    model.trained_on = plain.trained_on = None
    assert larger["last"]["test"] == evaluate(model, few_glyphs()).as_dict() != results["last"]["test"]
    plain.set_image_size(20)
    assert larger["last"]["test"] == evaluate(plain, few_glyphs()).as_dict()


def test_a_size_that_the_backbone_cannot_see_is_refused_before_training(tmp_path):
    options = {"weights": "none", "embedding_dim": 8, "image_size": 32}
    with pytest.raises(ValueError, match="vit_tiny_patch16_224 is built for images of 32 pixels, got 48: set"):
        run(tmp_path / "run", embedder=create_embedder("vit_tiny_patch16_224", **options), test_image_size=48)
    with pytest.raises(ValueError, match="set model.image_size for both"):
        small_config(test_image_size=48, freeze="trunk")
    with pytest.raises(ValueError, match="test_image_size must be >= 1 or null, got 0"):
        small_config(test_image_size=0)


def test_the_last_epoch_is_evaluated_whatever_the_interval(tmp_path):
    run(tmp_path / "run", epochs=3, evaluate_every=2, batch=BatchConfig(32, 4, per_epoch=1))
    assert [entry["epoch"] for entry in RunFolder(tmp_path / "run").entries("evaluation")] == [2, 3]


def test_the_saved_model_refuses_the_classes_it_was_trained_on(trained):
    embedder = load_embedder(trained[0])
    assert evaluate(embedder, few_glyphs()).num_queries == len(few_glyphs().test)
    with pytest.raises(SeenClassError, match="LATIN CAPITAL LETTER A"):
        evaluate(embedder, few_glyphs().train)


def test_results_hold_the_alignment_of_proxies_with_data(trained):
    results = trained[1]
    assert 0 < results["alignment"]["paper"] <= results["alignment"]["wasserstein2"] < 2


def test_a_loss_without_proxies_trains_too(tmp_path):
    results = run(tmp_path / "run", loss=LossConfig("pfml", {"proxies_per_class": 0}), **SHORT)
    assert "alignment" not in results


def test_the_loss_of_a_run_can_be_loaded_with_its_proxies(trained):
    loss = load_loss(trained[0])
    assert torch.equal(loss.proxies.detach(), outcome(trained[0])[0]["loss/proxies"])


def test_a_missing_gpu_is_said_in_words(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="torch finds no GPU"):
        run(tmp_path / "run", device="cuda")


def test_a_batch_larger_than_the_set_is_refused(tmp_path):
    with pytest.raises(ValueError, match="needs 9 training classes, and there are 8: lower batch.size to 32"):
        run(tmp_path / "run", batch=BatchConfig(36, 4))
    with pytest.raises(ValueError, match="batch.size must not exceed the 128 training images, got 200"):
        run(tmp_path / "run", batch=BatchConfig(200, 0))
    assert not (tmp_path / "run").exists()
    run(tmp_path / "run", **SHORT)  # what was refused has not taken the folder


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["pfml", "pfml-log", "proxy-anchor"])
def test_a_gpu_learns_what_a_cpu_learns_at_first(tmp_path, name):
    options = {} if name == "proxy-anchor" else {"proxies_per_class": 2}
    losses = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(1)
        changes = {"device": device, "epochs": 1, "loss": LossConfig(name, options), "deterministic": device == "cpu"}
        train(few_glyphs(), create_embedder("convnet", embedding_dim=8), small_config(**changes), out=tmp_path / device)
        losses[device] = [entry["loss"] for entry in RunFolder(tmp_path / device).entries("step")]
    assert losses["cuda"][0] == pytest.approx(losses["cpu"][0], rel=1e-3)
