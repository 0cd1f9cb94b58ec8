"""What happens to a run, and what it leaves: signals, full disks, broken weights, dead engines."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from test_engines import needs_vllm
from test_resume import resume, rows_of
from test_training import SMALL, timeless

import dppo
from conftest import ROOT

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and limits of POSIX")

# A run as a user starts it, in which the first call of a stage in some step meets `event`. What the
# event does is real: a signal from the kernel, a limit, a number in a weight.
DRIVER = """
import os, resource, signal, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import dppo
from test_faults import meet
meet(setattr, {owner}, {name!r}, {step}, lambda *_: {event})
dppo.main(sys.argv[1:])
"""
STAGES = {  # the step in which they are met, after two whole ones: step 1 ends with the save of 2
    "rollout": ("dppo.HfEngine", "generate", 2),
    "train": ("dppo", "update", 2),
    "save": ("dppo.torch", "save", 1),
}


def meet(patch, owner, name, step, event, call=1):
    """Let the call-th call of owner.name in `step` (None: before any) meet an event first."""
    now, calls, original, asked = [None], [], getattr(owner, name), dppo.problems_of

    def problems_of(problems, step, args):
        now.append(step)
        return asked(problems, step, args)

    def meets(*args, **kwargs):
        calls.extend([1] * (now[-1] == step))
        if len(calls) == call:
            calls.append(1)
            event(*args)
        return original(*args, **kwargs)

    patch(dppo, "problems_of", problems_of)
    patch(owner, name, meets)


FLAGS = [*SMALL, "--steps", "4", "--save-every", "1"]


def step_of(out):
    return torch.load(dppo.newest(out) / "trainer.pt")["step"]


def drive(out, stage, event, *flags, check=True):
    owner, name, step = STAGES[stage]
    code = DRIVER.format(root=str(ROOT), owner=owner, name=name, step=step, event=event)
    env = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    argv = [sys.executable, "-c", code, *FLAGS, "--out", str(out), *flags]
    child = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=env, process_group=0)
    said = child.communicate(timeout=300)[1].splitlines()
    nobody_left(child.pid)
    return child.returncode, [line for line in said if line.startswith("dppo: ")], said


def nobody_left(group, seconds=20):
    """The process group empties (a worker that was told to end may take a moment)."""
    for _ in range(10 * seconds):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.killpg(group, signal.SIGKILL)
    pytest.fail("a process was left behind")


@pytest.fixture(scope="module")
def straight(toy):
    dppo.main([*FLAGS, "--out", str(toy[0] / "whole")])
    return timeless(rows_of(toy[0] / "whole"))


@pytest.mark.parametrize(
    "stage, name", [*((stage, "SIGINT") for stage in STAGES), ("train", "SIGTERM")]
)
def test_a_signal_ends_the_run_and_loses_nothing(toy, straight, stage, name):
    out, number = toy[0] / f"{name}-{stage}", getattr(signal, name)
    rc, lines, _ = drive(out, stage, f"os.kill(os.getpid(), signal.{name})")
    done = 3 if stage == "train" else 2
    assert rc == 128 + number
    assert lines == [f"dppo: {name} after step {done}; --resume {out} goes on"]
    assert step_of(out) == done
    rows = rows_of(out)
    assert [row["step"] for row in rows] == [0, 1, 2][:done]
    if stage == "train":  # the minibatch was finished, the other three given up
        assert rows[2]["updates"] == 1 and rows[2] | straight[2] != rows[2]
        rows = rows[:2]
    assert timeless(rows) == straight[: len(rows)]
    resume(out)
    rows = timeless(rows_of(out))
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4] and rows[:2] == straight[:2]
    assert stage == "train" or rows == straight


@pytest.mark.parametrize("stage", STAGES)
def test_kill_9_in_every_stage(toy, straight, stage):
    """The next start has what the last checkpoint held, and the run ends the same."""
    out = toy[0] / f"SIGKILL-{stage}"
    rc, lines, _ = drive(out, stage, "os.kill(os.getpid(), signal.SIGKILL)")
    assert rc == -signal.SIGKILL and not lines
    assert step_of(out) == (1 if stage == "save" else 2)
    resume(out)
    assert timeless(rows_of(out)) == straight


def test_a_second_signal_stops_at_once(toy):
    out, number = toy[0] / "twice", "signal.SIGINT"
    rc, lines, _ = drive(out, "train", f"[os.kill(os.getpid(), {number}) for _ in (1, 2)]")
    assert rc == -signal.SIGINT and not lines
    assert step_of(out) == 2


def test_a_signal_while_starting(toy):
    out = toy[0] / "early"
    env = os.environ | dict(PYTHONUNBUFFERED="1")
    argv = [sys.executable, str(ROOT / "dppo.py"), *FLAGS, "--out", str(out)]
    child = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=env, process_group=0)
    for line in child.stderr:
        if line.startswith("no --model"):
            break
    child.send_signal(signal.SIGINT)
    last = child.communicate(timeout=300)[1].strip().splitlines()[-1]
    assert (child.returncode, last) == (130, "dppo: stopped while starting")
    nobody_left(child.pid)


def test_an_answer_that_is_stuck_ends_with_a_trainer_that_was_killed():
    code = (
        "import os, dppo; g = dppo.Grader(); g.same('x', 'y'); "
        "g.pipe.send(('9^{9^{9^{9}}}', 'x')); "
        "import time; time.sleep(1); os.kill(os.getpid(), 9)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, process_group=0)
    assert child.wait(60) == -signal.SIGKILL
    nobody_left(child.pid)


def test_a_worker_that_is_killed_is_replaced():
    """By the kernel, for its memory, or by a signal to the whole group."""
    grader = dppo.Grader()
    assert grader.same("\\frac{1}{2}", "0.5") is True
    grader.worker.kill()
    grader.worker.join()
    assert grader.same("\\frac{1}{2}", "0.5") is False  # this one is lost
    assert grader.same("\\frac{1}{2}", "0.5") is True
    grader.close()


def test_a_signal_to_the_whole_group(toy):
    """As a closed terminal, `timeout` or a cluster's scheduler send it."""
    out = toy[0] / "group"
    event = "(dppo.Grader().same('x', 'y'), os.killpg(0, signal.SIGTERM))"
    rc, lines, _ = drive(out, "train", event)
    assert rc == 143 and lines == [f"dppo: SIGTERM after step 3; --resume {out} goes on"]


@pytest.mark.parametrize("stage, done", [("train", 2), ("save", 1)])
def test_a_full_disk(toy, straight, stage, done):
    """From some moment on files end at 64 KiB: enough for the log, not for a checkpoint."""
    out = toy[0] / f"disk-{stage}"
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))"
    rc, (line,), said = drive(out, stage, limit)
    assert rc == 1 and f"dppo: step {3 if stage == 'train' else 2}, save: " in line
    kept = out / f"step-00000{done}"
    assert f"{kept} is kept, --resume {out} goes on" in line
    assert dppo.newest(out) == kept
    resume(out)
    assert timeless(rows_of(out)) == straight


def test_a_disk_that_is_full_from_the_start(toy):
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))"
    where = dict(owner="dppo", name="load_model", step=None)
    code = DRIVER.format(root=str(ROOT), event=limit, **where)
    argv = [sys.executable, "-c", code, *FLAGS, "--out", str(toy[0] / "small")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("dppo: step 0, save: ") and "no checkpoint yet" in last
    dppo.main([*FLAGS, "--steps", "1", "--out", str(toy[0] / "small")])  # and the next try starts


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_directory_that_takes_no_files(toy, capsys):
    with pytest.raises(SystemExit) as stop:
        dppo.main([*FLAGS, "--model", toy[1], "--dataset", toy[2], "--instruction", "",
                   *"--max-prompt 8 --max-response 4 --out /proc/run".split()])  # fmt: skip
    assert stop.value.code == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("dppo: --out /proc/run: ")


# ------------------------------------------------- numbers and code that go wrong, in one process


def test_an_error_outside_training_loses_no_step(toy, monkeypatch, capsys):
    monkeypatch.setattr(dppo, "metrics", lambda *_: 1 / 0)
    with pytest.raises(SystemExit):
        dppo.main([*SMALL, "--save-every", "9", "--out", str(toy[0] / "late")])
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("dppo: step 1, record: ZeroDivisionError") and "step-000001" in line
    assert step_of(toy[0] / "late") == 1


def test_an_error_while_starting_is_one_line(toy, monkeypatch, capsys):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(dppo, "load_model", out_of_memory)
    with pytest.raises(SystemExit) as stop:
        dppo.main([*FLAGS, "--out", str(toy[0] / "oom")])
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 1
    assert line.startswith("dppo: while starting: OutOfMemoryError: CUDA out of memory")


def broken(monkeypatch, capsys, out, owner, name, event, *flags, call=1):
    """A stage of step 2 meets an event -> the one line that the run ends with."""
    meet(monkeypatch.setattr, owner, name, 2, event, call)
    with pytest.raises(SystemExit) as stop:
        dppo.main([*FLAGS, "--out", str(out), *flags])
    assert stop.value.code == 1
    monkeypatch.undo()
    lines = [s for s in capsys.readouterr().err.splitlines() if s.startswith("dppo: ")]
    assert len(lines) == 1 and lines[0].endswith(f"step-000002 is kept, --resume {out} goes on")
    assert all(p.isfinite().all() for p in dppo.load_model(*loaded(out)).parameters())
    assert [row["step"] for row in rows_of(out)] == [0, 1]
    return lines[0]


def loaded(out):
    args = dppo.parse_args(["--resume", str(out)])
    args.model = str(dppo.newest(out))
    config, _, eos = dppo.load_tokenizer(args)
    return args, config, eos


def poison(model, *_):
    with torch.no_grad():
        model.get_output_embeddings().weight[3, 3] = float("nan")


def test_a_weight_that_turns_nan_before_the_rollout(toy, monkeypatch, capsys):
    event = lambda engine, *_: poison(engine.model)
    where = (dppo.HfEngine, "generate")
    line = broken(monkeypatch, capsys, toy[0] / "nan-push", *where, event)
    assert line.startswith("dppo: step 2, rollout: log mu is not finite")


def test_a_weight_that_turns_nan_in_training(toy, monkeypatch, capsys):
    line = broken(monkeypatch, capsys, toy[0] / "nan-train", dppo, "update", poison, call=2)
    assert line.startswith("dppo: step 2, train: log pi is not finite")


def test_a_weight_that_turns_nan_before_a_checkpoint(toy, monkeypatch, capsys):
    event = lambda run, *_: poison(run.model)
    with pytest.raises(SystemExit):
        original = dppo.record
        monkeypatch.setattr(dppo, "record", lambda run, *a: (event(run), original(run, *a)))
        dppo.main([*FLAGS, "--out", str(toy[0] / "nan-save")])
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "dppo: step 1, save: model.embed_tokens.weight is not finite" in line
    assert step_of(toy[0] / "nan-save") == 0


def test_an_infinite_gradient(toy, monkeypatch, capsys):
    event = lambda model, *_: model.get_output_embeddings().weight.register_hook(lambda g: g / 0)
    line = broken(monkeypatch, capsys, toy[0] / "inf", dppo, "update", event)
    assert line.startswith("dppo: step 2, train: the norm of the gradient is not finite")


def test_a_reward_that_raises(toy, monkeypatch, capsys):
    def event(*_):
        raise ValueError("no such\nanswer \x1b[31m")

    out = toy[0] / "raises"
    line = broken(monkeypatch, capsys, out, dppo.Grader, "__call__", event)
    assert line.startswith("dppo: step 2, grade: ValueError: no such answer [31m (")
    assert "in event" in (out / "traceback.txt").read_text()
    resume(out)
    assert [row["step"] for row in rows_of(out)] == [0, 1, 2, 3, 4]


@needs_vllm
def test_an_engine_that_dies(toy, monkeypatch, capsys):
    event = lambda engine, *_: engine.llm.llm_engine.engine_core.shutdown()
    where = (dppo.VllmEngine, "generate")
    line = broken(monkeypatch, capsys, toy[0] / "dead", *where, event, "--engine", "vllm")
    assert line.startswith("dppo: step 2, rollout: ")


@needs_vllm
def test_a_signal_while_vllm_samples(toy):
    STAGES["vllm"] = ("dppo.VllmEngine", "generate", 2)
    out, event = toy[0] / "vllm-int", "os.kill(os.getpid(), signal.SIGINT)"
    event = f"(signal.signal(signal.SIGALRM, lambda *_: {event}), signal.setitimer(0, 0.3))"
    rc, lines, _ = drive(out, "vllm", event, "--engine", "vllm", "--group-size", "256")
    del STAGES["vllm"]
    assert rc == 130 and lines == [f"dppo: SIGINT after step 2; --resume {out} goes on"]
    assert step_of(out) == 2
