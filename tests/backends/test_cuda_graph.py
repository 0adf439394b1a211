"""When a field is recorded; that what is recorded is right needs a GPU (test_fused.py)."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from pfml.backends import cuda_graph as replay
from pfml.backends.cuda_graph import CudaGraphed
from pfml.field import PowerLaw
from pfml.superposition import Charges, Field, PairWeights
from states import Yukawa

FIELD, WEIGHTS = Field(PowerLaw()), PairWeights()


@pytest.fixture
def replayed(monkeypatch, graphs_on_a_cpu):
    """A replayed function on a CPU, and what was recorded."""
    made = CudaGraphed(lambda samples, *_, **__: (samples.points.sum(), samples.points * 2))
    made.recorded = graphs_on_a_cpu
    monkeypatch.setattr(replay, "_may_be_recorded", lambda *_: True)
    monkeypatch.setattr(replay, "_kind_of_call", lambda samples, *_: samples.points.shape)
    return made


def call(replayed, size):
    points = torch.randn(size, 3)
    none = Charges(points[:0], torch.empty(0, dtype=torch.int64))
    return points, replayed._call(Charges(points, torch.zeros(size, dtype=torch.int64)), none, FIELD, WEIGHTS)


def test_it_is_recorded_at_the_fourth_call_and_gives_the_same(replayed):
    for _ in range(6):
        points, (total, doubled) = call(replayed, 4)
        torch.testing.assert_close(total, points.sum())
        torch.testing.assert_close(doubled, points * 2)
    assert len(replayed.recorded) == 1


@pytest.mark.parametrize("large", [2**23, 32])
def test_results_of_one_call_survive_the_next(replayed, monkeypatch, large):
    monkeypatch.setattr(replay, "LARGE_BYTES", large)
    results = [call(replayed, 4) for _ in range(8)]
    for points, (total, doubled) in results:
        torch.testing.assert_close(total, points.sum())
        torch.testing.assert_close(doubled, points * 2)


def test_the_energy_is_a_number_of_its_own(replayed):
    for _ in range(6):
        _, (total, _) = call(replayed, 4)
    assert total.untyped_storage().nbytes() == 4
    total /= 2


def test_more_kinds_of_calls_than_fit_are_not_recorded_over_and_over(replayed):
    for _ in range(100):
        for size in range(1, replay.KEPT + 3):
            call(replayed, size)
    assert len(replayed.recorded) <= 2 * (replay.KEPT + 2)


def test_what_cannot_be_recorded_is_computed(replayed, monkeypatch):
    def fails(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replay, "record", fails)
    for _ in range(8):
        points, (total, _) = call(replayed, 4)
        torch.testing.assert_close(total, points.sum())


def test_a_law_that_is_defined_again_under_its_name_is_another_kind(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))

    def field(factor):
        @dataclass(frozen=True)
        class Again(Yukawa):
            def attraction(self, r):
                return factor * super().attraction(r)

            def attraction_slope(self, r):
                return factor * super().attraction_slope(r)

        return Field(Again())

    charges = Charges(torch.randn(4, 3), torch.zeros(4, dtype=torch.int64))
    first, second = field(1.0), field(2.0)
    kinds = [replay._kind_of_call(charges, charges, each, WEIGHTS, (), {}) for each in (first, first, second)]
    assert first.handle == second.handle
    assert kinds[0] == kinds[1] != kinds[2]


def test_what_is_recorded_has_run_before(replayed, monkeypatch):
    """A kernel that is compiled while a graph is recorded may end the recording."""
    record, seen = replay.record, []
    replayed.compute = lambda samples, *_, **__: seen.append("compute") or (samples.points.sum(),)
    monkeypatch.setattr(replay, "record", lambda *given: seen.append("record") or record(*given))
    for _ in range(4):
        call(replayed, 4)
    assert seen[-4:] == ["compute", "record", "compute", "compute"]  # before, recorded, replayed


@pytest.mark.gpu
def test_a_recording_that_fails_leaves_nothing_behind():
    device = torch.device("cuda", torch.cuda.current_device())
    points, current = torch.rand(64, 64, device=device), torch.cuda.current_stream()

    def waits():
        return points @ points + (points.sum().item() > 0)

    for _ in range(2):
        with pytest.raises(RuntimeError):
            replay.record(waits, device)
        assert torch.cuda.current_stream() == current
        torch.cuda.empty_cache()
        torch.rand(3, device=device)
        graph, result = replay.record(lambda: points @ points, device)
        graph.replay()
        torch.testing.assert_close(result, points @ points)


@pytest.mark.gpu
def test_a_graph_survives_earlier_ones():
    """Memory of cuBLAS that the first graph of a stream took must not be that of later ones."""
    device = torch.device("cuda", torch.cuda.current_device())
    points = torch.rand(512, 512, device=device)
    graphs = [replay.record(lambda: points @ points @ points, device) for _ in range(70)]  # torch has 32 streams
    graph, result = graphs.pop()
    graphs.clear()
    torch.cuda.empty_cache()
    torch.rand(2**26, device=device)
    graph.replay()
    torch.testing.assert_close(result, points @ points @ points)
