import os
from dataclasses import replace

import pytest

from pfml.experiments.catalog import DATASET_BACKBONES, EXPERIMENTS, PAPER_SWEEPS, PROXY_COUNTS, base_config
from pfml.experiments.plan import PlanOptions, plan_experiment
from pfml.models import EmbedderConfig
from pfml.runs.config import StorageConfig
from pfml.training import METHODS, BatchConfig, LossConfig, ScheduleConfig
from processes import CONTEXT

TRAINED = [name for name, method in METHODS.items() if method.trains and not method.from_teachers]


@pytest.fixture(autouse=True)
def _no_roots(monkeypatch):
    for name in [name for name in os.environ if name.startswith("PFML_")]:
        monkeypatch.delenv(name)


def plan(name, **options):
    return plan_experiment(name, PlanOptions(**{"datasets": ("glyphs",), "seeds": (0,), **options}))


def keys(name, **options):
    return [run.key for run in plan(name, **options).runs]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_default_methods_of_an_experiment_exist(name):
    assert set(EXPERIMENTS[name].methods) <= METHODS.keys()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_keys_are_distinct(name):
    found = keys(name, seeds=(0, 1))
    assert len(set(found)) == len(found) > 0


COUNTS = {
    "retrieval": 24,
    "small-embedding": 12,
    "noise": 7 * 6,
    "alignment": 6,
    "ablation": 7 + 6 + 7 + 7,
    "mlrc": 18 * 5,
    "timing": 2 + 4,
    "figures": 1,
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_experiment_has_so_many_runs_for_a_seed_on_glyphs(name):
    assert len(plan(name).runs) == COUNTS[name]


def test_each_seed_data_set_and_backbone_has_all_methods(tmp_path):
    options = PlanOptions(
        datasets=("glyphs", "cub"),
        seeds=(0, 1),
        methods=("pfml", "proxy-anchor"),
        backbones=("convnet", "resnet50", "vit_small"),
        roots={"cub": tmp_path},
    )
    runs = plan_experiment("retrieval", options).runs
    assert len(runs) == 2 * (1 + 2) * 2
    assert [run.seed for run in runs] == [0] * 6 + [1] * 6


def test_results_outlive_options_that_came_later():
    pfml, anchor = keys("retrieval", methods=("pfml", "proxy-anchor"))
    assert (pfml, anchor) == ("fb3d13de2aab-28e540", "b46094c15cbb-28e540"), "stored results would be forgotten"
    (run,) = plan("retrieval", methods=("pfml",)).runs
    assert replace(run, config=replace(run.config, average=0.9)).result_key != run.result_key
    (run,) = plan("retrieval", methods=("proxy-anchor",)).runs
    trusting = replace(run.config, loss=LossConfig("proxy-anchor", {"trust": 0.3}))
    assert replace(run, config=trusting).result_key != run.result_key
    (soft,) = keys("retrieval", methods=("soft-triple",))
    assert soft == "a78b19cd42f1-28e540", "stored results would be forgotten"


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": BatchConfig(100, 4, per_epoch=7)},
        {"schedule": ScheduleConfig("milestones", milestones=(3,))},
        {"warm_up_after": 1, "warm_up_epochs": 1},
        {"model": EmbedderConfig("convnet", resize=40)},
        {"test_image_size": 40},
        {"loss": LossConfig("soft-triple", {"published_start": True})},
    ],
)
def test_options_that_came_later_count_once_they_are_used(changes):
    (run,) = plan("retrieval", methods=("soft-triple",)).runs
    before = {name: _without(getattr(run.config, name), value) for name, value in changes.items()}
    usual = replace(run, config=replace(run.config, **before))
    assert replace(run, config=replace(run.config, **changes)).result_key != usual.result_key


def _without(present, changed):
    """The changed value without what came later."""
    if isinstance(changed, BatchConfig):
        return replace(changed, per_epoch=None)
    if isinstance(changed, EmbedderConfig):
        return replace(changed, resize=None)
    return present


def tell_keys(found):
    found.put(keys("ablation"))


def test_keys_do_not_depend_on_the_process():
    found = CONTEXT.SimpleQueue()
    process = CONTEXT.Process(target=tell_keys, args=(found,))  # another interpreter, with hashes of another seed
    process.start()
    assert found.get() == keys("ablation")
    process.join()


def test_keys_do_not_depend_on_paths_and_devices(tmp_path):
    first, second = tmp_path / "one", tmp_path / "two"
    found = []
    for folder in (first, second):
        folder.mkdir()
        (folder / "weights.pth").write_bytes(b"the same")
        options = PlanOptions(
            datasets=("cub",),
            methods=("pfml",),
            seeds=(0,),
            backbones=("resnet50",),
            roots={"cub": folder},
            weights={"resnet50": folder / "weights.pth"},
            device="cpu" if folder == first else "auto",
        )
        found.append([run.key for run in plan_experiment("retrieval", options).runs])
    assert found[0] == found[1]
    (second / "weights.pth").write_bytes(b"others")
    assert [run.key for run in plan_experiment("retrieval", options).runs] != found[0]


def test_the_key_changes_with_what_changes_the_result_only():
    (run,) = plan("figures").runs
    for name, value in (("epochs", 3), ("seed", 5), ("batch_norm", "freeze"), ("autocast", "bfloat16")):
        assert replace(run, config=replace(run.config, **{name: value})).key != run.key, name
    for name, value in (("log_every", 3), ("device", "cuda:3"), ("storage", StorageConfig(workers=7))):
        assert replace(run, config=replace(run.config, **{name: value})).key == run.key, name


def test_an_option_that_has_its_default_changes_nothing():
    base = {run.settings[name]: run for run in plan("ablation").runs for name in run.settings if name == "delta"}[0.2]
    (retrieval,) = plan("retrieval", methods=("pfml",)).runs
    assert base.config.loss.options["delta"] == 0.2
    assert "delta" not in retrieval.config.loss.options
    assert base.result_key == retrieval.result_key
    assert base.key != retrieval.key


def test_experiments_share_results_but_not_with_times():
    options = {"methods": ("proxy-anchor",), "epochs": 8}
    results = {name: plan(name, **options).runs[0].result_key for name in ("retrieval", "noise", "alignment", "timing")}
    assert results["retrieval"] == results["noise"] == results["alignment"] != results["timing"]
    assert plan("figures", **options).runs[0].result_key == results["retrieval"]


def test_label_noise_depends_on_the_seed():
    runs = [run for run in plan("noise", methods=("pfml",), seeds=(3, 4)).runs if run.settings["noise"] == 0.2]
    assert [(run.config.data.noise.rate, run.config.data.noise.seed) for run in runs] == [(0.2, 3), (0.2, 4)]


def test_the_ablation_sweeps_one_value_at_a_time_and_keeps_the_gap():
    for run in plan("ablation", methods=("pfml", "pfml-log", "pfml-robust")).runs:
        options = {**METHODS[run.method].options(), **run.config.loss.options}
        ((name, value),) = run.settings.items()
        gap = (options["delta_rep"] or options["delta"]) - options["delta"]
        if name == "delta_rep_minus_delta_att":
            assert gap == pytest.approx(value)
        else:
            assert options[name] == value
            assert gap == pytest.approx({"pfml": 0, "pfml-log": 0.6, "pfml-robust": 0.3}[run.method])
    assert PAPER_SWEEPS["proxies_per_class"][0] == 0


def test_the_ablation_refuses_a_method_without_these_values():
    with pytest.raises(ValueError, match="values for pfml, pfml-log, pfml-robust, got the method 'triplet'"):
        plan("ablation", methods=("triplet",))


def test_mlrc_has_four_folds_and_their_concatenation():
    *folds, together = plan("mlrc", methods=("pfml",)).runs
    assert [run.config.data.validation for run in folds] == ["fold-0", "fold-1", "fold-2", "fold-3"]
    assert {run.dim for run in folds} == {128}
    assert together.dim == 512
    assert together.needs == tuple(run.key for run in folds)
    assert {run.config.select_by for run in folds} == {"map_at_r"}
    assert {run.config.batch.size for run in folds} == {32}


def test_a_data_set_without_root_is_a_remark(monkeypatch, tmp_path):
    options = PlanOptions(seeds=(0,), methods=("pfml",), backbones=("convnet", "resnet50"))
    found = plan_experiment("noise", options)
    assert {run.dataset for run in found.runs} == {"glyphs"}
    assert found.remarks == (
        "not run: no root for cub (--root cub=FOLDER, or PFML_CUB)",
        "not run: no root for cars (--root cars=FOLDER, or PFML_CARS)",
    )
    monkeypatch.setenv("PFML_CARS", str(tmp_path))
    found = plan_experiment("noise", options)
    assert {run.dataset for run in found.runs} == {"glyphs", "cars"}
    assert next(run for run in found.runs if run.dataset == "cars").config.data.root == tmp_path


def test_a_root_that_is_not_there_is_a_remark(tmp_path):
    found = plan("noise", datasets=("cub",), roots={"cub": tmp_path / "nothing"})
    assert found.runs == ()
    assert "must be a folder" in found.remarks[0]


def test_a_backbone_whose_weights_are_a_file_needs_it(tmp_path):
    options = {"datasets": ("cub",), "roots": {"cub": tmp_path}, "backbones": ("bn_inception",), "methods": ("pfml",)}
    found = plan("retrieval", **options)
    assert found.runs == ()
    (remark,) = found.remarks
    assert remark == "not run: no weights for bn_inception (--weights bn_inception=FILE, or PFML_BN_INCEPTION)"
    weights = tmp_path / "bn.pth"
    weights.write_bytes(b"")
    (run,) = plan("retrieval", **options, weights={"bn_inception": weights}).runs
    assert run.config.model.weights == str(weights)


def test_a_backbone_that_glyphs_do_not_have_is_a_remark():
    assert plan("retrieval", backbones=("resnet50",)).remarks == ("not run: glyphs has no configuration for resnet50",)


def test_wrong_names_are_errors_that_suggest_right_ones():
    with pytest.raises(ValueError, match="did you mean"):
        plan_experiment("retreival")
    with pytest.raises(ValueError, match="a method must be one of"):
        PlanOptions(methods=("pfmll",))
    with pytest.raises(ValueError, match="a data set must be one of"):
        PlanOptions(datasets=("bub",))


@pytest.mark.parametrize("method", TRAINED)
def test_every_method_has_a_configuration_with_the_same_number_of_proxies(method):
    config = base_config("glyphs", "convnet", method)
    assert config.loss.name == method
    counts = [config.loss.options[name] for name in PROXY_COUNTS if name in config.loss.options]
    assert counts == ([5] if "(C, M, D)" in METHODS[method].learns else [])


@pytest.mark.parametrize("dataset", [name for name in DATASET_BACKBONES if name != "glyphs"])
def test_every_backbone_of_a_data_set_has_a_configuration(dataset):
    for backbone in DATASET_BACKBONES[dataset]:
        config = base_config(dataset, backbone, "pfml")
        assert config.data.name == dataset
        assert config.loss.options["proxies_per_class"] == (2 if dataset == "sop" else 15)


def test_a_method_that_trains_nothing_is_left_out_where_training_is_the_point():
    assert plan("retrieval", methods=("zero-shot",)).runs[0].task == "untrained"
    found = plan("noise", methods=("zero-shot",))
    assert found.runs == ()
    assert found.remarks == ("not run: zero-shot trains nothing, and noise is about training",)
