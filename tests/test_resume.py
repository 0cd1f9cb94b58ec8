"""A run that goes on is the same run."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_engines import needs_vllm
from test_training import SMALL, timeless

import dppo


def rows_of(out, name="metrics.jsonl"):
    return [json.loads(line) for line in open(out / name)]


def go(out, *flags):
    dppo.main([*SMALL, "--eval-every", "2", "--out", str(out), *flags])
    return out


def resume(out, *flags):
    dppo.main(["--resume", str(out), *flags])
    return out


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        dppo.main([*argv])
    assert stop.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a.equal(b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("method", ["dppo-binary-tv", "minirl"])
def test_two_steps_and_two_more_are_four(toy, method):
    """Prompts, samples, metrics, weights and Adam's state, bit for bit."""
    straight = go(toy[0] / f"straight-{method}", "--steps", "4", "--method", method)
    halves = go(toy[0] / f"halves-{method}", "--steps", "2", "--method", method)
    assert len(rows_of(halves)) == 3  # two steps, and the accuracy of the final weights
    resume(halves, "--steps", "4")
    assert timeless(rows_of(straight)) == timeless(rows_of(halves))
    assert rows_of(straight, "samples.jsonl") == rows_of(halves, "samples.jsonl")
    last = "step-000004"
    assert same(*(load_file(out / last / "model.safetensors") for out in (straight, halves)))
    states = [torch.load(out / last / "trainer.pt") for out in (straight, halves)]
    assert states[0]["step"] == 4 and same(*(state["optimizer"]["state"] for state in states))


@pytest.fixture(scope="module")
def finished(toy):
    return go(toy[0] / "finished", "--steps", "3", "--save-every", "1")


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def test_the_newest_checkpoints_stay(finished):
    assert [path.name for path in dppo.checkpoints(finished)] == ["step-000003", "step-000002"]
    assert not [*finished.glob("*.partial")]


def test_changed_flags_are_told_one_by_one_and_take_effect(copy, capsys):
    resume(copy, "--steps", "4", "--lr", "1e-9", "--delta", "0.2")
    said = capsys.readouterr().err.splitlines()
    assert sorted(line for line in said if line.startswith("--resume: --")) == [
        "--resume: --delta was None, is now 0.2",
        "--resume: --lr was 0.0002, is now 1e-09",
        "--resume: --steps was 3, is now 4",
    ]
    before, after = (load_file(copy / f"step-00000{i}" / "model.safetensors") for i in (3, 4))
    assert max((before[name] - after[name]).abs().max() for name in before) < 1e-7
    assert json.loads((copy / "config.json").read_text())["lr"] == 1e-9  # for the next resume


def test_the_problems_of_a_run_and_their_order_stay(copy, capsys, tmp_path):
    rows = str(tmp_path / "rows.jsonl")
    said = refused(capsys, "--resume", str(copy), "--dataset", rows)
    assert "--dataset cannot change from" in said and rows in said
    said = refused(capsys, "--resume", str(copy), "--prompts-per-step", "8")
    assert "--prompts-per-step cannot change from 16 to 8" in said
    assert "--seed cannot change from 0 to 1" in refused(
        capsys, "--resume", str(copy), "--seed", "1"
    )
    out = str(tmp_path / "elsewhere")
    assert "--out cannot change" in refused(capsys, "--resume", str(copy), "--out", out)


def test_flags_of_a_resume_that_fails_do_not_stay(copy, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(dppo, "load_engine", lambda *_: dppo.die("no engine", 1))
        resume(copy, "--lr", "0.1")
    assert json.loads((copy / "config.json").read_text())["lr"] == 2e-4


def test_trust_is_asked_for_anew(copy):
    """A directory from somebody else must not switch it on."""
    config = json.loads((copy / "config.json").read_text())
    config |= dict(trust_remote_code=True, allow_pickle=True)
    (copy / "config.json").write_text(json.dumps(config))
    args = dppo.parse_args(["--resume", str(copy)])
    assert not args.trust_remote_code and not args.allow_pickle


def test_a_checkpoint_names_its_run(copy, capsys):
    args = dppo.parse_args(["--resume", str(copy / "step-000002")])
    assert (args.resume, args.out, args.steps) == (str(copy), str(copy), 3)
    model = str(copy / "model")
    shutil.copytree(copy / "step-000002", model)
    assert "no run in" in refused(capsys, "--resume", model)  # its config.json is a model's


def test_two_processes_do_not_write_into_one_run(copy, capsys):
    held = dppo.claim(copy)
    assert "another process runs in" in refused(capsys, "--resume", str(copy))
    held.close()
    resume(copy, "--steps", "3")


@pytest.mark.parametrize("damage", ["truncated weights", "truncated state", "unfinished"])
def test_what_cannot_be_read_is_passed_over_and_said(copy, capsys, damage):
    last = copy / "step-000003"
    if damage == "unfinished":
        last.rename(copy / "step-000003.partial")
    else:
        file = last / ("model.safetensors" if damage == "truncated weights" else "trainer.pt")
        file.write_bytes(file.read_bytes()[:-100])
    resume(copy, "--steps", "3")
    said = capsys.readouterr().err
    assert "step-000003" in said and ("put aside" in said or "removed" in said)
    assert f"from {copy / 'step-000002'}" in said
    assert [row["step"] for row in rows_of(copy)] == [0, 1, 2, 3]
    assert dppo.newest(copy).samefile(last)


def test_a_broken_checkpoint_does_not_push_out_good_ones(copy):
    (copy / "step-000003" / "trainer.pt").write_bytes(b"")
    resume(copy, "--steps", "4", "--keep", "1")
    assert [path.name for path in dppo.checkpoints(copy)] == ["step-000004"]
    assert (copy / "step-000003.unreadable").exists()


def test_nothing_to_resume_is_one_line(capsys, tmp_path, monkeypatch, copy):
    assert "no run in" in refused(capsys, "--resume", str(tmp_path / "nowhere"))
    monkeypatch.chdir(tmp_path)
    assert "no run in runs/" in refused(capsys, "--resume")
    for path in dppo.checkpoints(copy):
        shutil.rmtree(path)
    assert "no checkpoint" in refused(capsys, "--resume", str(copy))
    (copy / "config.json").write_text('{"steps": ')
    assert "no run in" in refused(capsys, "--resume", str(copy))


def test_alone_it_takes_the_newest_run(copy, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "failed").mkdir(parents=True)
    (tmp_path / "runs" / "failed" / "config.json").write_text("{}")
    shutil.move(copy, tmp_path / "runs" / "mine")
    dppo.main(["--resume", "--steps", "3"])
    assert "from runs/mine/step-000003" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["step-000004.partial", "step-000003.unreadable"])
def test_the_newest_run_is_found_after_a_crash_in_its_save(copy, tmp_path, monkeypatch, name):
    """What a killed save leaves is newer than every checkpoint, and holds the model's config."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    run = Path(shutil.move(copy, tmp_path / "runs" / "mine"))
    shutil.copytree(run / "step-000003", run / name)
    os.utime(run / name, (2e9, 2e9))
    assert dppo.config_of("")[0] == str(Path("runs", "mine"))
    assert dppo.config_of(str(run / name))[0] == str(run)


def test_a_torn_log_is_mended(copy):
    with open(copy / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "rew')
    dppo.rewind(copy / "metrics.jsonl", 2)
    assert [row["step"] for row in rows_of(copy)] == [0, 1]


def test_a_generation_config_that_transformers_does_not_save(toy, tmp_path):
    """It loads, with a warning; the run must not fail when it saves."""
    model = shutil.copytree(toy[1], tmp_path / "model")
    config = dict(eos_token_id=[0, 5], do_sample=False, temperature=0.6)
    (model / "generation_config.json").write_text(json.dumps(config))
    flags = [*SMALL, "--model", str(model), "--dataset", toy[2], "--instruction", ""]
    flags += "--max-prompt 8 --max-response 4 --minibatches 2 --steps 1".split()
    dppo.main([*flags, "--out", str(tmp_path / "out")])
    args = dppo.parse_args([*flags, "--model", str(tmp_path / "out" / "step-000001")])
    assert dppo.load_tokenizer(args)[2] == [0, 5]


@needs_vllm
def test_the_first_rollout_after_a_resume_has_the_resumed_weights(copy):
    resume(copy, "--engine", "vllm", "--steps", "4", "--lr", "1e-3")
    assert rows_of(copy)[3]["gap_log_max"] < 1e-4
    base = load_file(copy / "step-000003" / "model.safetensors")
    assert not same(base, load_file(copy / "step-000004" / "model.safetensors"))
