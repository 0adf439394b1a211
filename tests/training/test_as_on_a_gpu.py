"""All that a GPU run does differently, at once, on the CPU."""

import pytest
import torch

from pfml.models import create_embedder, load_embedder
from pfml.runs.checkpoint import load_checkpoint
from pfml.training import LossConfig, train
from small_data import InterruptAt, few_glyphs, small_config

pytestmark = pytest.mark.usefixtures("_tiny_network")


def run(out, *, resume=False, monitor=None, **changes):
    torch.manual_seed(1)
    embedder = create_embedder("tiny", embedding_dim=8)
    train(few_glyphs(), embedder, small_config(**changes), out=out, resume=resume, monitor=monitor)
    return embedder


CASES = {
    "warm-up": {"warm_up_epochs": 1, "batch_norm": "freeze"},
    "proxy anchor in bfloat16": {
        "autocast": "bfloat16",
        "batch_norm": "freeze-all",
        "loss": LossConfig("proxy-anchor"),
        "checkpoint_every": 1,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_it_resumes_from_its_checkpoint_to_the_bit_and_learns_what_a_plain_run_learns(
    tmp_path, request, monkeypatch, case
):
    plain = run(tmp_path / "plain", **CASES[case]).head.linear.weight.detach()
    request.getfixturevalue("as_on_a_gpu")
    embedder = run(tmp_path / "whole", **CASES[case])
    assert any(p.is_contiguous(memory_format=torch.channels_last) for p in embedder.parameters() if p.ndim == 4)
    tolerance = {"rtol": 0.05, "atol": 2e-3} if "autocast" in CASES[case] else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(embedder.head.linear.weight.detach(), plain, **tolerance)

    with pytest.raises(KeyboardInterrupt, match="state saved"):
        run(tmp_path / "broken", monitor=InterruptAt(5), **CASES[case])
    run(tmp_path / "broken", resume=True, **CASES[case])
    whole, broken = (load_checkpoint(tmp_path / name / "checkpoints")[0] for name in ("whole", "broken"))
    assert all(torch.equal(value, broken[name]) for name, value in whole.items())


def test_its_files_do_not_know_the_memory_format(tmp_path, as_on_a_gpu):
    embedder = run(tmp_path / "run", epochs=1)
    loaded = load_embedder(tmp_path / "run")
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in embedder.state_dict().items())
    assert all(value.is_contiguous() for value in load_checkpoint(tmp_path / "run" / "checkpoints")[0].values())
