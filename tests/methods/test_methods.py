"""One suite for every method: `check_method` runs each of `CHECKS` on each row of `METHODS`."""

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from pfml.cli import main
from pfml.cli.methods import markdown_table, recipe_table
from pfml.data import RetrievalData, draw_glyphs
from pfml.data.glyphs import Distortion
from pfml.evaluation import evaluate
from pfml.losses import PotentialFieldLoss, ProxyAnchorLoss
from pfml.methods import METHODS, LossConfig, create_loss
from pfml.models import EmbedderConfig, create_embedder, load_embedder
from pfml.runs.checkpoint import load_checkpoint
from pfml.runs.config import DataConfig
from pfml.runs.config_files import read_config
from pfml.runs.recipes import published_recipe, recipe_config
from pfml.runs.saved_loss import load_loss
from pfml.training import BatchConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig, train
from small_data import InterruptAt, few_glyphs, small_config, small_embedder

TRAINED = [name for name, method in METHODS.items() if method.trains and not method.from_teachers]
C, D, F = 4, 8, 12


@cache
def more_glyphs():
    mild = Distortion(rotation=5, scale=1.05, shear=0.05, shift=1, noise=0.05)
    return RetrievalData(
        "letters", *(draw_glyphs(chosen, copies=1, distortion=mild) for chosen in ("ABCDEFGHIJKL", "QRSTUVWXYZ"))
    )


def embedder_of(dims, **options):
    torch.manual_seed(0)
    return create_embedder("convnet", embedding_dim=dims, pooling="avg+max", **options)


@cache
def untrained_recall():
    return evaluate(embedder_of(16), more_glyphs()).recall[1]


def batch(size=12, classes=C, dims=D, **options):
    embeddings = torch.randn(size, dims, generator=torch.Generator().manual_seed(5), **options)
    return embeddings.requires_grad_(), torch.arange(size) % classes


def created(name, options=None, classes=C, dims=D):
    """The loss of a method; what it asks for besides embeddings is the same in every call."""
    loss = create_loss(LossConfig(name, options or {}), classes, dims, F)
    loss.register_forward_pre_hook(with_other_inputs, with_kwargs=True)
    return loss


def with_other_inputs(loss, arguments, others):
    generator, (size, dims) = torch.Generator().manual_seed(6), arguments[0].shape
    if getattr(loss, "needs_features", False):
        others = {"features": torch.randn(size, F, generator=generator), **others}
    if getattr(loss, "needs_nodes", False):
        others = {"nodes": torch.randn(size, loss.groups, dims // loss.groups, generator=generator), **others}
    if getattr(loss, "needs_routed", False):
        others = {"routed": torch.randn(size, dims, generator=generator), "distance": torch.rand(size), **others}
    return arguments, others


def value_and_gradients(loss, embeddings, labels):
    """The loss, and the gradients of the embeddings and of what the loss learns; all of them must exist."""
    for parameter in loss.parameters():
        parameter.grad = None
    memory = {name: buffer.clone() for name, buffer in loss.named_buffers()}
    torch.manual_seed(2)
    value = loss(embeddings, labels)
    value.backward()
    for name, buffer in loss.named_buffers():
        buffer.copy_(memory[name])  # so that the next call starts as this one did
    learned = [parameter for group in loss_groups(loss) for parameter in group["params"]]
    assert all(parameter.grad is not None for parameter in learned)
    return value.detach(), embeddings.grad, [parameter.grad for parameter in learned]


def loss_groups(loss):
    return loss.param_groups(lr=0.1, weight_decay=0.0)


def beats_the_untrained_net(name, tmp_path):
    base = small_config(
        epochs=3,
        evaluate_every=3,
        loss=LossConfig(name),
        optimizer=OptimizerConfig("adamw", lr=5e-3),
        schedule=ScheduleConfig("one-cycle"),
    )
    model = METHODS[name].model
    embedder = embedder_of(16 * model.get("parts", 1), **model)  # of which each part has enough dimensions
    results = train(more_glyphs(), embedder, recipe_config(name, base), out=tmp_path / "run")
    assert results["last"]["test"]["recall_at_1"] > untrained_recall() + 0.1
    assert ("alignment" in results) == (created(name).proxy_points().shape[1] > 0)


def resumes_bit_equal(name, tmp_path):
    config = recipe_config(name, small_config(epochs=1, loss=LossConfig(name)))

    def run(out, **options):
        torch.manual_seed(1)
        train(few_glyphs(), small_embedder(**METHODS[name].model), config, out=tmp_path / out, **options)

    run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("broken", monitor=InterruptAt(2))
    run("broken", resume=True)
    whole, broken = (load_checkpoint(tmp_path / folder / "checkpoints")[0] for folder in ("whole", "broken"))
    assert whole.keys() == broken.keys()
    for key in whole:
        assert torch.equal(whole[key], broken[key]), key
    stored = load_loss(tmp_path / "whole").state_dict()
    assert all(torch.equal(stored[key], whole[f"loss/{key}"]) for key in stored)


def has_the_same_bits_with_several_threads(name, tmp_path):
    """At sizes that PyTorch divides among threads, where rows that are taken by `x[i]` get gradients in any order."""
    loss, threads = created(name, classes=24, dims=512), torch.get_num_threads()
    first = None
    try:
        torch.set_num_threads(2)
        for _ in range(5):
            value, gradient, learned = value_and_gradients(loss, *batch(96, 24, 512))
            found = [value, gradient, *learned]
            first = first or [each.clone() for each in found]
            assert all(torch.equal(*pair) for pair in zip(found, first, strict=True))
    finally:
        torch.set_num_threads(threads)


def learns_what_it_says(name, tmp_path):
    loss = created(name)
    embeddings, labels = batch()
    _, gradient, learned = value_and_gradients(loss, embeddings, labels)
    assert gradient.abs().sum() > 0
    assert bool(METHODS[name].learns) == bool(learned)
    assert all(one.abs().sum() > 0 for one in learned)
    assert all(group["lr"] <= 0.2 for group in loss_groups(loss))


def counts_proxies_as_asked(name, tmp_path):
    loss = created(name)
    points = loss.proxy_points()
    assert (points.shape[0], points.shape[2]) == (C, D)
    torch.testing.assert_close(points.norm(dim=2), torch.ones(points.shape[:2]))
    for option in {"proxies_per_class", "centers_per_class"} & set(METHODS[name].option_names()):
        for count in (1, 3):
            loss = created(name, {option: count})
            assert loss.proxy_points().shape == (C, count, D)
            value, *_ = value_and_gradients(loss, *batch())
            assert torch.isfinite(value)


def takes_any_number_of_samples_per_class(name, tmp_path):
    loss = created(name)
    cases = [[0, 1, 2, 3], [0, 0, 1, 1], [0, 0, 0, 1], [2, 2, 2, 2], [1], [3, 3], [0, 1], []]
    for labels in cases:
        embeddings = torch.randn(len(labels), D, requires_grad=True)
        value, gradient, learned = value_and_gradients(loss, embeddings, torch.tensor(labels, dtype=torch.int64))
        for one in (value, gradient, *learned):
            assert torch.isfinite(one).all(), labels


def works_with_one_class(name, tmp_path):
    value, *gradients = value_and_gradients(created(name, classes=1), *batch(4, classes=1))
    assert torch.isfinite(value)
    assert torch.isfinite(gradients[0]).all()


def refuses_bad_labels(name, tmp_path):
    loss = created(name)
    embeddings, labels = batch()
    for bad in (-1, C, 2**40):
        wrong = labels.clone()
        wrong[7] = bad
        with pytest.raises(ValueError, match=rf"labels must lie in \[0, {C}\), got {bad} at index 7"):
            loss(embeddings, wrong)
    for wrong in (labels.float(), labels.bool()):
        with pytest.raises(TypeError, match="labels must be integers"):
            loss(embeddings, wrong)
    for wrong in (labels[:-1], labels[:, None]):
        with pytest.raises(ValueError, match=r"labels must be \(12,\)"):
            loss(embeddings, wrong)
    for kind in (torch.uint8, torch.int32):
        assert torch.isfinite(loss(embeddings, labels.to(kind)))


def refuses_bad_embeddings(name, tmp_path):
    loss = created(name)
    embeddings, labels = batch()
    for bad in (torch.nan, torch.inf):
        poisoned = embeddings.detach().clone()
        poisoned[3, 1] = bad
        with pytest.raises(ValueError, match="embeddings must be finite, got NaN or Inf in 1 rows: 3"):
            loss(poisoned, labels)
    with pytest.raises(ValueError, match=rf"embeddings must be \(batch, {D}\)"):
        loss(embeddings[:, :3], labels)
    learned = [parameter for group in loss_groups(loss) for parameter in group["params"]]
    if learned:
        with torch.no_grad():
            learned[0].view(-1)[0] = torch.nan
        with pytest.raises(ValueError, match="proxies must be finite"):
            loss(embeddings, labels)


def keeps_its_parameters_in_float32(name, tmp_path):
    loss = created(name)
    before = {key: (value.dtype, value.data_ptr()) for key, value in loss.named_parameters()}
    embeddings, labels = batch()
    expected, *_ = value_and_gradients(loss, embeddings, labels)
    for kind in (torch.float16, torch.bfloat16, torch.float64):
        half = embeddings.detach().to(kind).requires_grad_()
        torch.manual_seed(2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(half, labels)
        value.backward()
        assert value.dtype == (torch.float64 if kind is torch.float64 else torch.float32)
        assert half.grad.dtype == kind
        torch.testing.assert_close(value.float(), expected, rtol=0.1 if kind is torch.bfloat16 else 1e-2, atol=1e-2)
    assert before == {key: (value.dtype, value.data_ptr()) for key, value in loss.named_parameters()}
    assert all(parameter.grad.dtype is torch.float32 for parameter in loss.parameters() if parameter.grad is not None)


def survives_extremes(name, tmp_path):
    loss = created(name)
    _, labels = batch()
    directions = batch()[0].detach()
    expected, *_ = value_and_gradients(loss, directions.clone().requires_grad_(), labels)
    for length in (1e20, 1e-25):
        value, gradient, _ = value_and_gradients(loss, (length * directions).requires_grad_(), labels)
        if not getattr(loss, "needs_length", False):
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)
        assert torch.isfinite(value)
        assert torch.isfinite(gradient).all()
    awkward = {
        "a zero vector": directions.index_fill(0, torch.tensor([2]), 0.0),
        "no variance": directions.index_fill(0, torch.tensor([2]), 1.0),
        "coincident points": directions.index_copy(0, torch.tensor([1]), directions[:1]),
    }
    if loss.proxy_points().shape[1]:
        awkward["at a proxy"] = directions.index_copy(0, torch.tensor([0]), loss.proxy_points()[0, :1])
    for case, points in awkward.items():
        value, gradient, learned = value_and_gradients(loss, points.clone().requires_grad_(), labels)
        for one in (value, gradient, *learned):
            assert torch.isfinite(one).all(), case
            assert one.numel() == 0 or one.abs().max() < 1e10, case


CHECKS = [
    beats_the_untrained_net,
    resumes_bit_equal,
    has_the_same_bits_with_several_threads,
    learns_what_it_says,
    counts_proxies_as_asked,
    takes_any_number_of_samples_per_class,
    works_with_one_class,
    refuses_bad_labels,
    refuses_bad_embeddings,
    keeps_its_parameters_in_float32,
    survives_extremes,
]


#: Checks that train, which all methods but one of each kind go through in the slow tests.
TRAINING_CHECKS = (beats_the_untrained_net, resumes_bit_equal)
KINDS = ("pfml", "hist", "soft-triple", "triplet")


def check_cases():
    for check in CHECKS:
        for name in TRAINED:
            is_slow = check in TRAINING_CHECKS and name not in KINDS
            yield pytest.param(check, name, id=f"{check.__name__}-{name}", marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize(("check", "name"), [*check_cases()])
def test_check_method(check, name, tmp_path):
    torch.manual_seed(0)
    check(name, tmp_path)


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
    with pytest.raises(ValueError, match="did you mean 'soft-triple'"):
        LossConfig("softtriple")


def test_an_unknown_option_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="got 'detla'; did you mean 'delta'"):
        LossConfig("pfml", {"detla": 0.3})
    with pytest.raises(ValueError, match="got 'marign'; did you mean 'margin'"):
        LossConfig("soft-triple", {"marign": 0.3})


def test_a_value_of_the_wrong_kind_is_named():
    with pytest.raises(ValueError, match="'alpha': 'abc'"):
        create_loss(LossConfig("pfml", {"alpha": "abc"}), 3, 8)
    with pytest.raises(ValueError, match="margin must be a finite number, got 'abc'"):
        create_loss(LossConfig("triplet", {"margin": "abc"}), 3, 8)
    with pytest.raises(ValueError, match="num_bins must be an integer, got 2.5"):
        create_loss(LossConfig("fast-ap", {"num_bins": 2.5}), 3, 8)
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        create_loss(LossConfig("nt-xent", {"temperature": 0}), 3, 8)


def test_num_classes_is_no_option():
    with pytest.raises(ValueError, match="num_classes"):
        LossConfig("pfml", {"num_classes": 3})


@pytest.mark.parametrize("name", TRAINED)
def test_every_option_changes_something_of_the_loss(name):
    """The state of the loss tells each option's value, or its value and gradient do."""
    method = METHODS[name]
    if not hasattr(method.loss, "__wrapped__"):
        return  # losses with test files of their own
    for option, default in method.options().items():
        torch.manual_seed(0)
        usual = created(name)
        torch.manual_seed(0)
        other = not default if isinstance(default, bool) else default + 1 if isinstance(default, int) else 0.7
        changed = created(name, {option: other})
        values = []
        for loss in (usual, changed):
            points = torch.randn(24, D, generator=torch.Generator().manual_seed(1)).requires_grad_()
            value, gradient, learned = value_and_gradients(loss, points, torch.arange(24) % C)
            values.append((value, gradient, *learned))
        same = all(one.shape == other.shape and torch.allclose(one, other) for one, other in zip(*values, strict=True))
        assert not same, option


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning", None)
    with pytest.raises(ImportError, match=r"pip install 'pfml\[methods\]'"):
        create_loss(LossConfig("triplet"), 3, 8)


def test_all_methods_share_the_recipe_but_for_what_their_losses_need():
    base = TrainConfig(batch=BatchConfig(120, 0), epochs=7)
    for name in TRAINED:
        config = recipe_config(name, base)
        assert config.loss == LossConfig(name)
        per_class, proxy_lr = (4 if METHODS[name].needs_positives else 0), METHODS[name].proxy_lr
        batch, optimizer = replace(base.batch, samples_per_class=per_class), replace(base.optimizer, proxy_lr=proxy_lr)
        assert config == replace(base, loss=config.loss, batch=batch, optimizer=optimizer)
    assert recipe_config("margin", base).optimizer.proxy_lr == 5e-4
    assert recipe_config("triplet", replace(base, batch=BatchConfig(6, 0))).batch.samples_per_class == 2
    assert recipe_config("triplet", replace(base, batch=BatchConfig(120, 5))).batch.samples_per_class == 5


def test_a_recipe_keeps_the_options_of_the_same_method_only():
    base = TrainConfig(loss=LossConfig("triplet", {"margin": 0.3}))
    assert recipe_config("triplet", base).loss.options == {"margin": 0.3}
    assert recipe_config("semihard", base).loss.options == {}


@pytest.mark.parametrize(
    "name",
    [
        "normalized-softmax", "nt-xent", "cosface", "hyp", "contextual",
        pytest.param("hier", marks=pytest.mark.slow),  # 512 proxies, and triplets of each
    ],
)  # fmt: skip
def test_a_published_recipe_trains_as_it_is_printed(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("pfml.data.datasets.read_glyphs", few_glyphs)
    main(["methods", f"--recipe={name}"])
    printed = capsys.readouterr().out
    recipe = published_recipe(name, "cub", "resnet50").recipe
    assert printed.startswith(f"# {name}, {recipe.setting}: {recipe.optimizer}")
    assert ("# not as published: " in printed) == bool(recipe.departs)
    file = tmp_path / "recipe.yaml"
    file.write_text(printed)
    # the network and batch of the glyphs; the rest is the recipe's
    small = ["--data.name=glyphs", "--model.backbone=convnet", "--model.weights=none", "--model.embedding_dim=8"]
    small += ["--model.image_size=null", "--model.resize=null", "--batch.per_epoch=null"]
    batch = ["--batch.size=8", f"--batch.samples_per_class={min(recipe.samples_per_class, 2)}", "--epochs=1"]
    main(["train", f"--config={file}", *small, *batch, "--device=cpu", f"--out={tmp_path / 'run'}"])
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    trained = read_config(tmp_path / "run" / "config.yaml")
    expected = recipe_config(name, RunConfig(data=DataConfig("cub")), published=True)
    assert (trained.optimizer, trained.loss, trained.batch_norm) == (
        expected.optimizer, expected.loss, expected.batch_norm,
    )  # fmt: skip
    assert results["last"]["epoch"] == 1


def test_a_published_recipe_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="no published recipe of circle"):
        recipe_config("circle", TrainConfig(), published=True)
    with pytest.raises(ValueError, match="did you mean 'circle'"):
        recipe_config("circl", TrainConfig())
    with pytest.raises(SystemExit, match="no published recipe of circle"):
        main(["methods", "--recipe=circle"])


def test_zero_shot_evaluates_the_backbone_and_trains_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("pfml.data.datasets.read_glyphs", few_glyphs)
    main(["train", "--config=glyphs", "--loss.name=zero-shot", f"--out={tmp_path / 'run'}", "--device=cpu"])
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    backbone = EmbedderConfig("convnet", weights="none", embedding_dim=None, pooling="avg+max")
    expected = evaluate(load_embedder(tmp_path / "run"), few_glyphs())
    assert load_embedder(tmp_path / "run").config == backbone
    assert results["last"]["epoch"] == 0
    assert results["last"]["test"]["recall_at_1"] == pytest.approx(expected.recall[1])
    assert "last epoch, epoch 0" in printed
    with pytest.raises(ValueError, match="zero-shot trains nothing"):
        train(few_glyphs(), small_embedder(), small_config(loss=LossConfig("zero-shot")), out=tmp_path / "other")


def test_the_command_lists_every_method(capsys):
    main(["methods"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in METHODS)
    assert "centers_per_class" in printed


def test_the_documentation_shows_the_table_as_it_is(capsys):
    main(["methods", "--markdown"])
    printed = capsys.readouterr().out.strip()
    assert printed == f"{markdown_table()}\n\n{recipe_table()}"
    documentation = (Path(__file__).parents[2] / "docs" / "METHODS.md").read_text(encoding="utf-8")
    assert all(table in documentation for table in printed.split("\n\n")), (
        "docs/METHODS.md: replace its tables by what `pfml methods --markdown` prints"
    )
