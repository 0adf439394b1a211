"""Published recipes: found by method, data set and backbone, with the authors' values and nothing of others."""

import json
import math
import sys

import pytest
import torch
import yaml

from pfml.cli import main
from pfml.methods import METHODS, create_loss
from pfml.methods.recipe import Recipe, chosen_recipe
from pfml.models import EmbedderConfig
from pfml.runs.config import DataConfig
from pfml.runs.config_files import plain, read_config
from pfml.runs.recipes import published_recipe, recipe_config
from pfml.training import BatchConfig, LossConfig, OptimizerConfig, RunConfig, ScheduleConfig
from pfml.training.optimizer import create_optimizer
from small_data import few_glyphs, small_embedder

#: Those that are run on CUB with ResNet-50 as they were published.
SIX = ("proxy-anchor", "hist", "proxy-gml", "multi-similarity-miner", "soft-triple", "proxy-nca++")


def published(method, dataset="cub", backbone="resnet50", **loss):
    base = RunConfig(data=DataConfig(dataset), model=EmbedderConfig(backbone), **loss)
    return recipe_config(method, base, published=True)


def test_proxy_anchor_has_the_values_of_its_backbone_and_data_set():
    resnet = published("proxy-anchor")
    assert (resnet.batch.size, resnet.warm_up_epochs, resnet.epochs) == (120, 5, 60)
    assert resnet.schedule == ScheduleConfig("step", every=5, factor=0.5)
    assert (resnet.optimizer.name, resnet.optimizer.proxy_lr, resnet.optimizer.clip_value) == ("adamw", 0.01, 10)
    assert (resnet.model.pooling, resnet.model.embedding_dim, resnet.batch_norm) == ("avg+max", 512, "freeze")
    inception = published("proxy-anchor", backbone="bn_inception")
    assert (inception.batch.size, inception.warm_up_epochs, inception.schedule.every) == (180, 1, 10)
    assert published("proxy-anchor", "cars").schedule.every == 10
    assert published("proxy-anchor", "cars", "bn_inception").schedule.every == 20
    sop = published("proxy-anchor", "sop", "bn_inception")
    assert (sop.optimizer.lr, sop.optimizer.proxy_lr, sop.batch_norm) == (6e-4, 0.06, "train")


def test_hist_has_cub_s_values_on_cub():
    config = published("hist")
    assert config.loss == LossConfig("hist", {"alpha": 1.1, "network_lr": 6e-4})
    assert config.optimizer == OptimizerConfig(
        "adam", lr=1.2e-4, proxy_lr=0.1, weight_decay=5e-5, proxy_weight_decay=5e-5
    )
    assert (config.batch, config.epochs, config.warm_up_epochs) == (BatchConfig(32, 0), 41, 1)
    # halved after every five epochs, of which the warm-up is none
    assert config.schedule == ScheduleConfig("milestones", factor=0.5, milestones=(6, 11, 16, 21, 26, 31, 36))
    assert (config.model.layer_norm, config.model.pooling) == ("embedding", "avg+max")
    assert published("hist", "cars").loss.options == {"alpha": 0.9, "network_lr": 1e-3}
    sop = published("hist", "sop")
    assert (sop.loss.options["tau"], sop.optimizer.proxy_lr, sop.batch_norm) == (16.0, 0.01, "train")


def test_the_network_of_hist_has_its_own_rate_whatever_that_of_the_gaussians():
    config = published("hist")
    loss = create_loss(config.loss, 3, 8)
    rates = {id(p): group["lr"] for group in create_optimizer(config.optimizer, small_embedder(), loss).param_groups
             for p in group["params"]}  # fmt: skip
    assert rates[id(loss.proxies)] == 0.1
    assert rates[id(loss.network.linear1.weight)] == 6e-4


def test_normalized_softmax_has_the_rate_batch_and_epochs_of_its_commands():
    config = published("normalized-softmax")
    assert config.optimizer == OptimizerConfig(
        "sgd", lr=1e-3, proxy_lr=1e-3, weight_decay=1e-4, proxy_weight_decay=1e-4, momentum=0.9
    )
    assert (config.batch, config.epochs, config.warm_up_epochs) == (BatchConfig(75, 25), 31, 1)
    assert config.schedule == ScheduleConfig("milestones", factor=0.1, milestones=(16,))
    assert config.batch_norm == "train"
    assert (config.model.embedding_dim, config.model.layer_norm) == (None, "features")
    assert published("normalized-softmax", "cars").optimizer.lr == 0.01


def test_proxy_nca_plus_plus_warms_up_for_five_epochs_at_its_own_size():
    config = published("proxy-nca++")
    assert (config.epochs, config.warm_up_epochs, config.batch) == (45, 5, BatchConfig(32, 4))
    assert (config.optimizer.lr, config.optimizer.proxy_lr, config.optimizer.eps) == (4e-3, 400, 1)
    model = config.model
    assert (model.embedding_dim, model.image_size, model.resize) == (2048, 256, 288)
    assert (model.pooling, model.layer_norm, config.batch_norm, config.head_start) == (
        "max", "features", "train", "uniform",
    )  # fmt: skip


def test_multi_similarity_counts_its_steps_and_always_mines():
    config = published("multi-similarity-miner")
    assert config.batch == BatchConfig(80, 5, per_epoch=200)
    assert config.epochs * config.batch.per_epoch == 3000
    assert config.schedule == ScheduleConfig("milestones", factor=0.1, milestones=(6, 12))  # steps 1,200 and 2,400
    assert config.loss.options == {"beta": 40.0}
    assert (config.augmentation.scale, config.model.image_size, config.model.resize) == ((0.16, 1.0), 227, 256)
    assert config.batch_norm == "freeze-statistics"
    assert published("multi-similarity-miner", backbone="bn_inception").model.pooling == "max"


@pytest.mark.parametrize("method", ["soft-triple", "proxy-gml"])
def test_rates_fall_in_the_twentieth_and_fortieth_epoch_as_the_code_has_it(method):
    config = published(method)
    assert config.schedule == ScheduleConfig("milestones", factor=0.1, milestones=(19, 39))
    assert (config.optimizer.eps, config.batch_norm, config.head_start) == (0.01, "freeze-statistics", "uniform")


def test_proxy_gml_warms_up_in_its_second_epoch():
    config = published("proxy-gml")
    assert [config.is_warm_up(epoch) for epoch in range(4)] == [False, True, False, False]
    assert published("proxy-gml", "sop").loss.options == {"proxies_per_class": 1, "proxy_weight": 0.0}


def test_easy_positives_have_the_recipe_of_their_repository():
    found = published_recipe("epshn", "cars", "resnet18")
    assert (found.recipe.optimizer, found.recipe.lr, found.recipe.samples_per_class) == ("sgd", 0.03, 16)
    assert not found.remark


def test_the_paper_s_recipes_are_its_shipped_configurations():
    from pfml.runs.config_files import shipped_config

    for dataset in ("cub", "cars", "sop"):
        for backbone in ("resnet50", "bn_inception"):
            shipped, config = shipped_config(f"{dataset}-{backbone}-512"), published("pfml", dataset, backbone)
            for name in ("optimizer", "batch", "epochs", "warm_up_epochs", "batch_norm", "schedule"):
                assert getattr(config, name) == getattr(shipped, name), (dataset, backbone, name)
            count = {"proxies_per_class": 15} | dict(config.loss.options)
            assert count["proxies_per_class"] == shipped.loss.options["proxies_per_class"]


@pytest.mark.parametrize("method", ["soft-triple", "proxy-gml", "proxy-nca", "nt-xent"])
def test_where_the_authors_have_no_resnet_50_the_recipe_says_whose_values_it_has(method):
    remark = published_recipe(method, "cub", "resnet50").remark
    assert remark.startswith("the source gives no values for cub with resnet50; these are those for c")
    assert remark.endswith("with bn_inception")
    assert remark in printed_recipe(method)


def printed_recipe(method):
    from pfml.cli.methods import recipe_yaml

    return recipe_yaml(method)


def test_every_recipe_names_its_source_and_makes_a_configuration():
    for name, method in METHODS.items():
        for recipe in method.recipes:
            assert len(recipe.source) > 5, name
            config = published(name, recipe.dataset or "cub", recipe.backbone or "resnet50")
            create_loss(config.loss, 100, 8, 4)
            assert config.loss.options.items() >= dict(recipe.options).items()
            assert config.optimizer.lr == recipe.lr
            assert config.batch_norm == (recipe.batch_norm or RunConfig().batch_norm)


def test_a_method_brings_what_it_needs_of_the_model_with_and_without_its_recipe():
    for method, field, count in (("drml-pa", "relations", 4), ("dfml-pa", "sub_blocks", 3)):
        assert getattr(published(method).model, field) == count
        base = RunConfig(data=DataConfig("cub"), model=EmbedderConfig("resnet50"))
        assert getattr(recipe_config(method, base).model, field) == count
        chosen = RunConfig(data=DataConfig("cub"), model=EmbedderConfig("resnet50", **{field: 2}))
        assert getattr(recipe_config(method, chosen, published=True).model, field) == 2
        assert getattr(recipe_config("proxy-anchor", base).model, field) == 1


def test_htl_draws_neighboring_classes():
    assert published("htl", backbone="bn_inception").batch == BatchConfig(640, 10, neighbors=3)


A, B, C, D = (
    Recipe("adam", 1.0, "a", dataset="cub", backbone="resnet50"),
    Recipe("adam", 2.0, "b", dataset="sop", backbone="bn_inception"),
    Recipe("adam", 3.0, "c", dataset="cars", backbone="vit_small"),
    Recipe("adam", 4.0, "d"),
)


@pytest.mark.parametrize(
    ("recipes", "dataset", "backbone", "lr", "said"),
    [
        ((A, B, C), "sop", "bn_inception", 2, ""),
        ((A, B, C), "sop", "resnet50", 2, "sop with resnet50; these are those for sop with bn_inception"),
        ((A, B, C), "in-shop", "vit_small", 3, "in-shop with vit_small; these are those for cars with vit_small"),
        ((A, B, C), "photos/", "convnet", 1, "photos/ with convnet; these are those for cub with resnet50"),
        ((A, B, C), "cub", "resnet50_he", 1, ""),
        ((B, D), "cub", "resnet50", 4, ""),
        ((A, B, C), None, None, 1, ""),
    ],
)
def test_a_recipe_is_for_the_data_set_then_the_backbone_then_any_and_says_so(recipes, dataset, backbone, lr, said):
    found = chosen_recipe(recipes, dataset, backbone)
    assert found.recipe.lr == lr
    assert found.remark.endswith(said)
    assert bool(found.remark) == bool(said)
    assert chosen_recipe((), dataset, backbone) is None


def test_options_of_the_user_override_those_of_the_recipe():
    config = published("hist", loss=LossConfig("hist", {"alpha": 1.5}))
    assert config.loss.options == {"alpha": 1.5, "network_lr": 6e-4}


def test_the_command_prints_the_recipe_for_what_is_asked(capsys):
    main(["methods", "--recipe=hist"])
    printed = capsys.readouterr().out
    assert printed.startswith("# hist, cub with resnet50: adam 0.00012")
    assert yaml.safe_load(printed)["loss"]["options"]["alpha"] == 1.1
    main(["methods", "--recipe=hist", "--dataset=cars"])
    assert yaml.safe_load(capsys.readouterr().out)["loss"]["options"]["alpha"] == 0.9
    main(["methods", "--recipe=proxy-anchor", "--backbone=bn_inception"])
    assert yaml.safe_load(capsys.readouterr().out)["batch"]["size"] == 180


@pytest.fixture
def asked(monkeypatch):
    """The configurations that `pfml train` would run."""
    found = []

    def stop(config, out, **options):
        found.append(config)
        raise ValueError("stopped")

    monkeypatch.setattr(sys.modules["pfml.training.runner"], "run", stop)
    return found


@pytest.mark.parametrize("method", SIX)
def test_one_command_trains_a_method_as_it_was_published(method, asked, tmp_path, capsys):
    with pytest.raises(SystemExit, match="stopped"):
        main(["train", "--recipe", method, "--data.root", str(tmp_path), f"--out={tmp_path / 'run'}"])
    expected = published(method)
    assert plain(asked[0])["data"].pop("root") == str(tmp_path)
    for name in plain(expected):
        if name != "data":
            assert getattr(asked[0], name) == getattr(expected, name), name
    assert asked[0].data.name == "cub"
    assert f"[{published_recipe(method, 'cub', 'resnet50').recipe.source}]" in capsys.readouterr().out


def test_typed_options_and_the_network_of_a_file_are_heeded(asked, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("data: {name: cars}\nmodel: {backbone: bn_inception, weights: none}\nepochs: 3\n")
    with pytest.raises(SystemExit, match="stopped"):
        main(["train", "--recipe=proxy-anchor", f"--config={file}", "--optimizer.lr=2e-4", f"--out={tmp_path / 'run'}"])
    (config,) = asked
    assert (config.data.name, config.model.backbone, config.model.weights) == ("cars", "bn_inception", "none")
    assert (config.schedule.every, config.batch.size, config.epochs) == (20, 180, 60)
    assert (config.optimizer.lr, config.optimizer.proxy_lr) == (2e-4, 0.01)
    with pytest.raises(SystemExit, match="leave out --loss.name"):
        main(["train", "--recipe=hist", "--loss.name=pfml"])
    with pytest.raises(SystemExit, match="no published recipe of circle"):
        main(["train", "--recipe=circle"])
    with pytest.raises(SystemExit, match="did you mean 'hist'"):
        main(["train", "--recipe=hits"])


def test_a_run_by_recipe_stores_it_and_logs_both_terms_of_hist(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("pfml.data.datasets.read_glyphs", few_glyphs)
    small = ["--data.name=glyphs", "--model.backbone=convnet", "--model.weights=none", "--model.embedding_dim=8"]
    short = ["--epochs=2", "--log_every=1", "--device=cpu", f"--out={tmp_path / 'run'}"]
    main(["train", "--recipe=hist", *small, *short])
    printed = capsys.readouterr().out
    assert "the source gives no values for glyphs with convnet; these are those for cub with resnet50" in printed
    config = read_config(tmp_path / "run" / "config.yaml")
    assert config.loss.options == {"alpha": 1.1, "network_lr": 6e-4}
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    for line in steps:
        assert math.isclose(sum(line["terms"].values()), line["loss"], rel_tol=1e-5)
    evaluation = next(line for line in lines if line["kind"] == "evaluation")
    first = [line["terms"]["hypergraph"] for line in steps if line["epoch"] == 0]
    assert evaluation["terms"]["hypergraph"] == pytest.approx(sum(first) / len(first))


@pytest.mark.parametrize(
    ("method", "dataset", "classes", "dim"), [("soft-triple", "cub", 100, 64), ("normalized-softmax", "cars", 98, 512)]
)
def test_published_starts_let_proxies_turn_under_published_optimizers(method, dataset, classes, dim):
    """From length 3 they turn by 5 degrees in 60 steps, and next to nothing is learned; as published by 59 and 43."""

    def turned(published_start):
        torch.manual_seed(0)
        config = published(method, dataset)
        loss = create_loss(LossConfig(method, {"published_start": published_start}), classes, dim)
        optimizer = create_optimizer(config.optimizer, small_embedder(), loss)
        centers = torch.nn.functional.normalize(torch.randn(classes, dim), dim=1)
        before = loss.proxy_points()
        for _ in range(60):
            labels = torch.randint(classes, (config.batch.size,))
            optimizer.zero_grad()
            loss(centers[labels] + 0.05 * torch.randn(len(labels), dim), labels).backward()
            optimizer.step()
        cosines = (before * loss.proxy_points()).sum(dim=2).clamp(-1, 1)
        return torch.rad2deg(torch.acos(cosines)).mean().item()

    assert published(method, dataset).loss.options["published_start"] is True
    assert turned(published_start=True) > 30
    assert turned(published_start=False) < 8
