"""Fixtures of all tests.

Every worker collects every file, so heavy packages that few tests need (scikit-learn, Qdrant, ONNX, matplotlib,
torchvision) are imported within these tests. The process that starts the workers loads no torch.
"""

import ctypes
import os
import signal
from dataclasses import replace
from importlib import import_module

import pytest


def pytest_addoption(parser):
    parser.addoption("--all-packages", action="store_true", help="fail a test whose package is missing or broken")


def _has_gpu():
    """As torch.cuda.is_available() says it, without torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


if not _has_gpu():  # here, before another conftest imports the kernels: they then run on a CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config):
    if config.getoption("all_packages"):
        pytest.importorskip = lambda name, **_: import_module(name)


@pytest.fixture(autouse=True)
def _seed():
    import torch

    torch.manual_seed(0)


@pytest.fixture
def heeds_hangups():
    """SIGHUP as a terminal leaves it: nohup ignores it, and all that it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def pytest_collection_modifyitems(items):
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module")
def one_thread():
    """Tiny operations on several threads are all waiting, and endless waiting where other tests run beside them."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def quick_interpreter():
    """Kernels in Triton's interpreter in a third of the time.

    It looks through its whole language whenever a kernel calls a function, to exchange what is already exchanged; and
    it checks every sum and product of integers for overflow, which a GPU does not.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="the kernels need the package triton")
    language = pytest.importorskip("triton.language", reason="the kernels need the package triton")

    def called(self, *arguments, **options):
        modules = [one for one in self.fn.__globals__.values() if one is language or one is language.core]
        if any(language.core.is_builtin(one.arange) for one in modules):
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **options)

    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", called)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield


@pytest.fixture(scope="module")
def _tiny_network():
    """The backbone "tiny", of two convolutions, which is compiled in a third of the time of the small convnet."""
    from pfml.models.backbone_table import BACKBONES
    from tiny_network import TINY

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKBONES, "tiny", TINY)
        yield


@pytest.fixture(scope="module")
def coarse_plots():
    """Plots of a sixteenth of the pixels, which take most of the time of a page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pfml.plots.theme.PIXEL_DENSITY", 0.5)
        patch.setattr("pfml.plots.maps.PIXEL_DENSITY", 1)  # whose tiles have whole pixels
        yield


@pytest.fixture
def _without_plots():
    from plain_pages import without_plots

    with without_plots():
        yield


@pytest.fixture
def _small_pretrained():
    from tiny_network import small_pretrained

    with small_pretrained():
        yield


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """A lag of one step, a fused optimizer, channels last, checkpoints in the background, a compiled network."""
    import torch

    from pfml.runs.checkpoint import CheckpointWriter

    compiled = torch.compile
    channels_last = lambda embedder, device: embedder.to(memory_format=torch.channels_last)  # noqa: E731
    in_background = lambda folder, **_: CheckpointWriter(folder, in_background=True)  # noqa: E731
    monkeypatch.setattr("pfml.training.loop.reading_lag", lambda config, device: 1)
    monkeypatch.setattr("pfml.training.loop.on_device", channels_last)
    monkeypatch.setattr("pfml.training.loop.CheckpointWriter", in_background)
    monkeypatch.setattr("pfml.training.loop.compiles", lambda config, device, steps: True)
    monkeypatch.setattr(torch, "compile", lambda module, **options: compiled(module, backend="aot_eager", **options))


@pytest.fixture
def graphs_on_a_cpu(monkeypatch):
    """CUDA graphs that compute when they are replayed, like real ones; a list of what was recorded."""
    from types import SimpleNamespace

    import torch
    from torch.utils._pytree import tree_leaves

    from pfml.backends import cuda_graph

    recorded = []

    def record(compute, device):
        result = compute()

        def replay():
            with torch.inference_mode(False), torch.no_grad():
                for place, now in zip(tree_leaves(result), tree_leaves(compute()), strict=True):
                    if isinstance(place, torch.Tensor):
                        place.copy_(now)

        recorded.append(device)
        return SimpleNamespace(replay=replay), result

    monkeypatch.setattr(cuda_graph, "record", record)
    return recorded
