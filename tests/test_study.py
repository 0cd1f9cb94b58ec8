"""The studies of toy/: what they change is what they say, and the committed figures are theirs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dppo
from toy import figures, lm, study, tokens

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("bits", [8, 5, 4])
def test_a_quantised_engine_rounds_its_own_weights_only(bits):
    model = lm.random_model(14)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    engine = study.Quantised(dppo.Args(), [0], 0, bits)
    engine.push(model)
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())
    rounded = engine.model.state_dict()
    matrix = "model.layers.0.mlp.up_proj.weight"
    assert max(len(row.unique()) for row in rounded[matrix]) <= 2**bits - 1
    step = before[matrix].abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    error = (rounded[matrix] - before[matrix]).abs()
    assert 0 < error.max() and (error <= step * 0.5001).all()
    kept = [name for name in before if torch.equal(rounded[name], before[name])]
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= {*kept}
    assert not engine.exact


def test_a_study_runs_goes_on_and_is_not_repeated(tmp_path):
    out = tmp_path / "study.jsonl"

    def call(methods):
        flags = f"--seeds 1 --steps 2 --lrs 6e-4 --engine 5-bit --out {out} --methods".split()
        run = [sys.executable, "-m", "toy.study", *flags, methods]
        return subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=300)

    first = call("dppo-binary-tv --top-k 5,pg-is")
    assert first.returncode == 0, first.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["method"] for row in rows} == {"dppo-binary-tv --top-k 5", "pg-is"}
    for row in rows:
        assert all(len(row[name]) == 2 for name in study.SERIES) and not row["ended"]
        assert len(row["accuracy"]) == 2 and min(row["gap_mean"]) > 1e-4  # the engine does differ
    same = call("pg-is")
    assert same.returncode == 0 and "0 runs to do, 1 in" in same.stderr
    assert len(out.read_text().splitlines()) == 2
    wrong = call("ppg-is")
    assert wrong.returncode == 2 and "--methods ppg-is: choose from" in wrong.stderr


def test_token_data_holds_the_certificate():
    draw = torch.Generator().manual_seed(0)
    laws = [torch.randn(50, 30, generator=draw).mul(2).log_softmax(-1) for _ in range(2)]
    y = torch.multinomial(laws[0].exp(), 1, generator=draw)
    sample = dppo.Sample([1], y, torch.zeros(50, 1), True)
    sample.A = 0.5
    row = {k: torch.tensor(v) for k, v in tokens.compare([sample], *laws, (0, 1, 5, 30)).items()}
    mu, pi = (law.double().exp() for law in laws)
    exact = (mu - pi).abs().sum(-1) / 2
    assert torch.allclose(row["tv_0"].double(), (row["mu"] - row["pi"]).abs().double(), atol=1e-3)
    for K in (0, 1, 5):
        assert (row[f"tv_{K}"] <= exact + 1e-3).all()
        assert (exact <= row[f"tv_{K}"] + row[f"rest_{K}"] + 1e-3).all()
    for name in ("tv_30", "tv_V"):
        assert torch.allclose(row[name].double(), exact, atol=1e-3)


def test_the_committed_data_draw_every_figure(tmp_path, monkeypatch):
    for file in figures.HERE.glob("*.jsonl"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(figures, "HERE", tmp_path)
    figures.main()
    for name in figures.FIGURES:
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert (ROOT / "toy" / "figures" / f"{name}.png").exists()


def test_word_problems_are_rows_that_dppo_reads():
    rows = [*tokens.word_problems(20)]
    assert rows == [*tokens.word_problems(20)] and len(rows) == 20
    for row in rows:
        assert [m["role"] for m in row["question"]] == [*"user assistant".split() * 2, "user"]
        digits = [int(w) for w in row["question"][-1]["content"].split() if w.isdigit()]
        assert sum(digits) == int(row["answer"])
