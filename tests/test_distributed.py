"""Several processes are one trainer: torchrun with gloo on a CPU against a single process."""

import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file
from test_engines import needs_vllm
from test_resume import rows_of
from test_training import SMALL, timeless

from conftest import ROOT

# so few tokens a forward that the ranks get unequal numbers of them
FLAGS = [*SMALL, "--method", "minirl", "--micro-batch-tokens", "150", "--steps", "3"]


def launch(ranks, *flags):
    run = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    env = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    argv = [sys.executable, *run, str(ROOT / "dppo.py"), *flags]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=500)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def runs(toy):
    outs = {ranks: toy[0] / f"ranks-{ranks}" for ranks in (1, 2)}
    for ranks, out in outs.items():
        launch(ranks, *FLAGS, "--out", str(out))
    return outs


def close(a, b):
    assert len(a) == len(b)
    for row, other in zip(timeless(a), timeless(b)):
        assert row == pytest.approx(other, rel=1e-4, abs=1e-5)


def same_weights(a, b, step):
    a, b = (load_file(out / step / "model.safetensors") for out in (a, b))
    assert a.keys() == b.keys()
    assert max((a[name] - b[name]).abs().max() for name in a) < 1e-5


def test_two_ranks_are_one_trainer(runs):
    """The same samples, metrics and weights: one denominator, whole gradients."""
    close(rows_of(runs[1]), rows_of(runs[2]))
    assert rows_of(runs[1], "samples.jsonl") == rows_of(runs[2], "samples.jsonl")
    same_weights(runs[1], runs[2], "step-000003")


def test_a_checkpoint_of_one_serves_two_and_the_other_way_round(runs):
    launch(2, "--resume", str(runs[1]), "--steps", "5")
    launch(1, "--resume", str(runs[2]), "--steps", "5")
    close(rows_of(runs[1]), rows_of(runs[2]))
    same_weights(runs[1], runs[2], "step-000005")


@needs_vllm
def test_each_rank_has_its_own_vllm(toy):
    out = toy[0] / "ranks-vllm"
    done = launch(2, *FLAGS, "--engine", "vllm", "--out", str(out))
    assert max(row.get("gap_log_max", 0) for row in rows_of(out)) < 1e-4
    assert done.stderr.count("step 0: evaluation accuracy") == 1  # one rank speaks
