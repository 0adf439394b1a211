"""When a model is compiled, how often, and that it learns the same."""

import pytest
import torch

from pfml.models import create_embedder
from pfml.runs.checkpoint import load_checkpoint
from pfml.runs.config import RunConfig
from pfml.runs.config_files import read_config, write_config
from pfml.training import BatchConfig, LossConfig, OptimizerConfig, TrainConfig, train
from pfml.training.environment import COMPILED_FROM, compiled, compiles
from small_data import InterruptAt, few_glyphs, small_config

CPU, GPU = torch.device("cpu"), torch.device("cuda")

pytestmark = pytest.mark.usefixtures("_tiny_network")


def run(out, *, resume=False, monitor=None, **changes):
    torch.manual_seed(1)
    train(
        few_glyphs(),
        create_embedder("tiny", embedding_dim=8),
        small_config(**changes),
        out=out,
        resume=resume,
        monitor=monitor,
    )
    return load_checkpoint(out / "checkpoints")[0]["embedder/head.linear.weight"]


def test_auto_compiles_long_runs_on_a_gpu_only():
    assert compiles(TrainConfig(), GPU, COMPILED_FROM)
    assert not compiles(TrainConfig(), GPU, COMPILED_FROM - 1)
    assert not compiles(TrainConfig(), CPU, COMPILED_FROM)
    assert not compiles(TrainConfig(deterministic=True), GPU, COMPILED_FROM)


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("asked", [True, False])
def test_what_is_asked_for_is_done(asked, device):
    for steps in (1, 10 * COMPILED_FROM):
        assert compiles(TrainConfig(compile=asked, deterministic=True), device, steps) is asked


@pytest.mark.parametrize("value", [True, False, "auto"])
def test_the_choice_survives_a_file(tmp_path, value):
    write_config(tmp_path / "config.yaml", RunConfig(compile=value))
    assert read_config(tmp_path / "config.yaml").compile == value


def test_another_word_for_it_is_refused(tmp_path):
    with pytest.raises(ValueError, match="compile must be true, false or auto, got 'maybe'"):
        TrainConfig(compile="maybe")


def test_a_run_may_resume_with_another_choice(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", monitor=InterruptAt(2), compile=False)
    run(tmp_path / "run", resume=True, compile="auto")


@pytest.mark.parametrize("batch_norm", ["train", "freeze", "freeze-all"])
def test_after_the_warm_up_all_is_one_graph_and_learns_what_an_eager_run_learns(tmp_path, monkeypatch, batch_norm):
    graphs, compiled = [], torch.compile

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda module, **options: compiled(module, backend=counting, **options))
    torch.compiler.reset()
    changes = {"epochs": 4, "warm_up_epochs": 2, "evaluate_every": 4, "batch_norm": batch_norm}
    changes |= {"loss": LossConfig("proxy-anchor"), "batch": BatchConfig(32, 4, per_epoch=1)}
    learned = run(tmp_path / "compiled", compile=True, **changes)
    assert len(graphs) == 1
    torch.testing.assert_close(learned, run(tmp_path / "eager", **changes), rtol=1e-4, atol=1e-6)


def test_another_size_of_image_is_compiled_for_itself_too(monkeypatch):
    graphs, compile_ = [], torch.compile

    def counting(graph, inputs):
        graphs.append(all(isinstance(size, int) for each in inputs for size in each.shape))
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda module, **options: compile_(module, backend=counting, **options))
    torch.compiler.reset()
    embeddings_of = compiled(torch.nn.AdaptiveAvgPool2d(1), CPU)
    for size in (8, 6, 7):
        embeddings_of(torch.zeros(1, 3, size, size))
    assert graphs == [True, True, True]


@pytest.mark.slow
def test_a_model_compiled_to_machine_code_learns_the_same(tmp_path):
    changes = {"epochs": 2, "warm_up_epochs": 1, "batch_norm": "freeze", "optimizer": OptimizerConfig("adamw", lr=1e-3)}
    torch.compiler.reset()
    eager, compiled = (run(tmp_path / str(flag), compile=flag, **changes) for flag in (False, True))
    torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-4)


def test_on_a_gpu_it_runs_as_cuda_graphs_whose_results_are_copied(monkeypatch):
    asked, left = [], torch.zeros(2, 3)  # where a graph leaves its results, each time
    monkeypatch.setattr(torch, "compile", lambda network, **options: asked.append(options) or (lambda pixels: left))
    embeddings_of = compiled(torch.nn.Identity(), GPU)
    first = embeddings_of(torch.empty(2, 3))
    left += 1
    assert asked == [{"mode": "reduce-overhead", "dynamic": False}]
    assert torch.equal(first, torch.zeros(2, 3))
    compiled(torch.nn.Identity(), CPU)
    assert asked[1:] == [{"dynamic": False}]


@pytest.mark.gpu
def test_a_compiled_step_on_a_gpu_has_the_gradients_of_an_eager_one():
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).cuda()
    quick = compiled(network, torch.device("cuda"))
    for step in range(6):
        pixels = torch.randn(4, 5, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        gradients = []
        for forward in (network, quick):
            network.zero_grad(set_to_none=True)
            forward(pixels).square().sum().backward()
            gradients.append([parameter.grad.clone() for parameter in network.parameters()])
        for eager, graphed in zip(*gradients, strict=True):
            torch.testing.assert_close(eager, graphed, rtol=1e-4, atol=1e-5)
