"""The update and the whole script."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from test_engines import EOS, disturb, load, needs_vllm, prompts_of
from transformers import AutoModelForCausalLM

import dppo
from conftest import ROOT


def rollout(directory, method, K=0, G=4, shift=0.0):
    """A graded rollout with A by a made-up reward, and a trainer whose weights moved since."""
    args, model = load(directory)
    engine = dppo.HfEngine(args, [EOS], K)
    engine.push(model)
    samples = engine.generate(prompts_of([3, 8, 20, 5]), G, 0)
    dppo.score(model, samples, args)
    R = torch.tensor([float(s.y_ids[0, 0] % 2) for s in samples])
    for s, A in zip(samples, dppo.group_advantages(R, G).tolist()):
        s.A = A
    assert any(s.A for s in samples)
    if shift:
        disturb(model, 7)
    return args, model, samples


def step(args, model, samples, method, lr=1e-3):
    """Gradients of one update, and what it saw."""
    grads = {}
    optimizer = torch.optim.SGD(model.parameters(), lr)
    optimizer.register_step_pre_hook(
        lambda *_: grads.update({n: p.grad.clone() for n, p in model.named_parameters()})
    )
    return grads, dppo.update(model, optimizer, samples, method, args)


@pytest.mark.parametrize("loss_agg", ["constant", "token-mean"])
@pytest.mark.parametrize("tied", [True, False])
def test_gradient_does_not_depend_on_how_the_minibatch_is_cut(models, loss_agg, tied):
    directory = models("tied" if tied else "untied", tie_word_embeddings=tied)
    results = []
    for tokens, chunk in [(10**6, 10**6), (1, 7), (64, 3), (100, 1)]:
        method = dppo.METHODS["dppo-topk-tv"]
        args, model, samples = rollout(directory, method, K=3, shift=1)
        args.micro_batch_tokens, args.head_chunk, args.loss_agg = tokens, chunk, loss_agg
        args.max_grad_norm = 1e9
        results.append(step(args, model, samples, method)[0])
    for grads in results[1:]:
        for name, g in grads.items():
            assert torch.allclose(g, results[0][name], rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize("name", ["dppo-binary-tv", "dppo-topk-kl", "grpo", "cispo", "minirl"])
@pytest.mark.parametrize("loss_agg", ["constant", "token-mean"])
def test_update_is_the_written_out_loss(models, name, loss_agg):
    """Sequence by sequence, full logits, plain autograd, no code of the update."""
    method = dppo.replace(dppo.METHODS[name], top_k=min(3, dppo.METHODS[name].top_k))
    args, model, samples = rollout(models("tied"), method, K=method.top_k, shift=1)
    args.loss_agg, args.max_grad_norm = loss_agg, 1e9
    total, tokens, blocked = 0.0, 0, 0
    for s in samples:
        ids = torch.tensor([s.prompt + s.y_ids[:, 0].tolist()])
        logits = model(input_ids=ids).logits[0, len(s.prompt) - 1 : -1]
        logp = (logits / args.temperature).log_softmax(-1).gather(-1, s.y_ids)
        pi = logp.detach().exp().masked_fill(s.logmu == -math.inf, 0)
        anchor = (s.old if method.anchor == "recomputed" else s.logmu).exp()
        keep = dppo.keep_mask(torch.full((len(ids[0]) - len(s.prompt),), s.A), anchor, pi, method)
        r = (logp[:, 0].detach() - s.logmu[:, 0]).exp().clamp(max=method.cap)
        total = total - (keep * r * s.A * logp[:, 0]).sum()
        tokens, blocked = tokens + len(s.y_ids), blocked + (~keep).sum().item()
    denominator = tokens if loss_agg == "token-mean" else len(samples) * args.max_response
    want = torch.autograd.grad(total / denominator, [*model.parameters()])
    grads, _ = step(args, model, samples, method)
    assert blocked or name == "cispo"
    for (name, g), w in zip(grads.items(), want):
        assert torch.allclose(g, w, rtol=1e-3, atol=1e-6), name


def test_no_informative_group_means_no_step(models):
    args, model, samples = rollout(models("tied"), dppo.METHODS["dppo-binary-tv"])
    before = [p.clone() for p in model.parameters()]
    for s in samples:
        s.A = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.5)
    assert dppo.update(model, optimizer, samples, dppo.METHODS["dppo-binary-tv"], args) is None
    assert all(a.equal(b) for a, b in zip(before, model.parameters()))


def test_a_step_raises_what_was_rewarded(models):
    args, model, samples = rollout(models("tied"), dppo.METHODS["pg-is"])
    args.max_grad_norm = 1e9
    step(args, model, samples, dppo.METHODS["pg-is"], lr=0.05)
    before = [s.old[:, 0].sum() for s in samples]
    dppo.score(model, samples, args)
    change = sum(s.A * (s.old[:, 0].sum() - b) for s, b in zip(samples, before))
    assert change > 0


@pytest.mark.parametrize("name", ["log pi", "the norm of the gradient"])
def test_nothing_moves_when_something_is_not_finite(models, name):
    args, model, samples = rollout(models("tied"), dppo.METHODS["dppo-binary-tv"])
    if name == "log pi":
        with torch.no_grad():
            model.get_output_embeddings().weight[3, 3] = math.nan
    else:
        model.get_output_embeddings().weight.register_hook(lambda g: g * math.inf)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(dppo.Stop, match=f"{name} is not finite"):
        step(args, model, samples, dppo.METHODS["dppo-binary-tv"])
    for a, b in zip(before, model.parameters()):
        assert torch.equal(a.nan_to_num(), b.detach().nan_to_num())


def test_the_mask_sees_an_engine_that_differs(models):
    """The anchor is what the engine recorded: it blocks though the trainer stands still."""
    args, model, samples = rollout(models("tied"), dppo.METHODS["dppo-binary-tv"])
    fresh = step(args, model, samples, dppo.METHODS["dppo-binary-tv"], lr=0.0)[1]
    assert fresh["keep"].all() and fresh["D"].max() < 1e-5
    for s in samples:
        s.logmu = s.logmu + 1.5
    seen = step(args, model, samples, dppo.METHODS["dppo-binary-tv"], lr=0.0)[1]
    assert not seen["keep"].all() and seen["D"].max() > 0.15
    seen = step(args, model, samples, dppo.METHODS["dppo-binary-tv-recompute"], lr=0.0)[1]
    assert seen["keep"].all() and seen["D"].max() < 1e-5


def test_micro_batches_hold_every_sample_once_within_the_budget():
    samples = [
        dppo.Sample([1] * n, torch.zeros(m, 1), None, True)
        for n, m in [(3, 9), (1, 1), (7, 2), (2, 2), (5, 9)]
    ]
    batches = [*dppo.micro_batches(samples, 24)]
    assert sorted(id(s) for b in batches for s in b) == sorted(map(id, samples))
    sizes = [[len(s.prompt) + len(s.y_ids) for s in b] for b in batches]
    assert sizes == [[14], [12, 9], [4, 2]]


def test_every_prompt_once_an_epoch_and_a_step_alone_says_which():
    problems = [*range(10)]
    args = dppo.Args(prompts_per_step=4, seed=3)
    drawn = [p for step in range(5) for p in dppo.problems_of(problems, step, args)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == problems and drawn[:10] != drawn[10:]
    assert dppo.problems_of(problems, 3, args) == drawn[12:16]
    assert dppo.problems_of(problems, 3, dppo.Args(prompts_per_step=4, seed=4)) != drawn[12:16]


# -------------------------------------------------------------------------------- whole runs


def run(out, *flags, check=True):
    """The script as a user starts it -> rows of metrics.jsonl, stdout, stderr"""
    argv = [sys.executable, str(ROOT / "dppo.py"), "--out", str(out), *flags]
    env = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=500)
    assert not check or done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in open(out / "metrics.jsonl")] if check else []
    return rows, done.stdout, done.stderr


SMALL = "--engine hf --solve-rate-samples 4 --eval-samples 1 --prompts-per-step 16".split()


def timeless(rows):
    return [
        {k: v for k, v in r.items() if not k.startswith("s_") and "per_s" not in k} for r in rows
    ]


def test_a_run_with_the_hf_engine_repeats_exactly(toy):
    root = toy[0]
    first, *_ = run(root / "a", *SMALL, "--steps", "3", "--seed", "1")
    again, *_ = run(root / "b", *SMALL, "--steps", "3", "--seed", "1")
    other, *_ = run(root / "c", *SMALL, "--steps", "3", "--seed", "2")
    assert timeless(first) == timeless(again) != timeless(other)


@pytest.mark.parametrize("method", ["dppo-topk-kl", "minirl-tis", "mask-0.5", "grpo-relax-both"])
def test_other_rows_run_whole(toy, method):
    flags = ["--method", method, "--steps", "2"] + ["--top-k", "5"] * (method == "dppo-topk-kl")
    rows, out, _ = run(toy[0] / method, *SMALL, *flags)
    assert len(rows) == 3 and all(math.isfinite(v) for row in rows for v in row.values())


GLOSSARY = """step reward solved informative length truncated entropy updates
gap_log_mean gap_log_max gap_mean gap_max gap_last_mean gap_last_max
blocked blocked_pos blocked_neg bad_updates D_mean D_max ratio_max grad_norm
s_push s_rollout s_grade s_score s_train tokens_per_s grader_timeouts"""


@needs_vllm
def test_a_run_on_vllm_learns_and_leaves_what_it_promises(toy):
    root, *_ = toy
    rows, out, err = run(root / "vllm", "--steps", "30", "--eval-every", "30")
    final = rows.pop()
    assert final == {"step": 30, "accuracy": final["accuracy"]} and "accuracy" in rows[0]
    mean = lambda key, part: sum(r[key] for r in part) / len(part)
    assert mean("reward", rows[-5:]) > mean("reward", rows[:5]) + 0.05
    assert max(r["gap_log_max"] for r in rows) < 1e-3  # of mu and pi, at equal weights
    assert {*rows[-1]} == {*GLOSSARY.split()}
    assert max(r["D_max"] for r in rows) > 0.15 and max(r["blocked"] for r in rows) > 0
    table = out.splitlines()
    assert table[0].split() == "before after mismatch blocked steps time".split()
    before, after = map(float, table[1].split()[:2])
    assert after > before + 0.05 and abs(after - final["accuracy"]) < 1e-3
    assert err.count('"response"') == 3  # three graded samples of the first step
    samples = [json.loads(line) for line in open(root / "vllm" / "samples.jsonl")]
    assert len(samples) == 90 and {*samples[0]} == {"step", "prompt", "response", "gold", "R"}
    assert json.load(open(root / "vllm" / "config.json"))["method"] == "dppo-binary-tv"
    model = AutoModelForCausalLM.from_pretrained(root / "vllm" / "step-000030")
    base = AutoModelForCausalLM.from_pretrained(toy[1])
    assert not model.lm_head.weight.equal(base.lm_head.weight)
