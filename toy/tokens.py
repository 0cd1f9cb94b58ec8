"""Token by token: how engine and trainer differ at equal weights, and what each mask blocks.

    python -m toy.tokens --label toy --method grpo --lr 6e-4 --steps 8
    python -m toy.tokens --label SmolLM2 --model DIR --lr 1e-5 ...        see toy/README.md

All flags but --label, --dtypes and --out are those of dppo.py. A --model without a --dataset gets
word problems of one addition, with worked examples before them: a small chat model solves some.

One line of JSON for each engine dtype (float32, bfloat16) with mu and pi of sampled tokens at equal
weights, the paper's Figure 2; and one with what the last minibatch of each step holds just before
its update: mu, pi, entropy, A, the token, and D_TV at K = 0, 1, 5, 20 and V. There mu is the
trainer's law at the rollout's weights, which the whole vocabulary is known of.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

import torch

import dppo

STORIES = [
    "{0} has {1} {3}. {0} buys {2} more. How many {3} does {0} have now?",
    "There are {1} {3} on a table and {2} {3} in a box. How many {3} are there in all?",
    "{0} sold {1} {3} on Monday and {2} on Tuesday. How many {3} did {0} sell?",
    "{0} needs {1} {3} for the school and {2} {3} at home. How many {3} does {0} need?",
]
WORKED = [
    ("Ann has 2 pens. Ann buys 5 more. How many pens does Ann have now?", (2, 5)),
    ("Ben sold 8 books on Monday and 6 on Tuesday. How many books did Ben sell?", (8, 6)),
]


def word_problems(n, seed=0):
    """Chats as rows of dppo.py's GSM8K shape."""
    draw, names, things = random.Random(seed), "Tom Eva Sam Mia".split(), "apples cups keys".split()
    shots = []
    for question, (a, b) in WORKED:
        answer = f"First there are {a}, then {b} more, so {a} + {b} = {a + b}.\nAnswer: {a + b}"
        shots += [dict(role="user", content=question), dict(role="assistant", content=answer)]
    for _ in range(n):
        a, b = draw.randint(2, 9), draw.randint(2, 9)
        question = draw.choice(STORIES).format(draw.choice(names), a, b, draw.choice(things))
        yield dict(question=[*shots, dict(role="user", content=question)], answer=str(a + b))


def short(x):
    return [float(f"{value:.5g}") for value in x.tolist()]


def equal_weights(run, label, dtype):
    """mu of the engine and pi of the trainer, of one rollout's tokens (N,)."""
    chosen = dppo.problems_of(run.problems, 0, run.args)
    samples = dppo.rollout(run, chosen, run.args.group_size, run.args.seed)
    dppo.score(run.model, samples, run.args)
    mu, pi = (dppo.flat(samples, name, "cpu")[:, 0].exp() for name in ("logmu", "old"))
    mu, pi = mu.double(), pi.double()
    gap, r = (pi - mu).abs(), pi / mu
    differ = f"|pi-mu| mean {gap.mean():.2g}, largest {gap.max():.2g}"
    print(f"{label}, {dtype}: {len(mu)} tokens, {differ}; r from {r.min():.4f} to {r.max():.4f}")
    data = dict(mu=short(mu), change=short(pi - mu))  # pi itself would be rounded
    return dict(kind="mismatch", label=label, dtype=dtype) | data


@torch.no_grad()
def law(run, samples):
    """log pi over the whole vocabulary, sample after sample (N, V)."""
    laws = []
    for s in samples:
        f = lambda hidden, weight: dppo.log_probs(hidden, weight, run.args.temperature)
        with dppo.autocast():
            laws.append(run.model.at_head([s], f).cpu())
    return torch.cat(laws)


def last_minibatches(run, label, Ks=(0, 1, 5, 20)):
    """Train on all minibatches; at each step look at the last one before its update."""
    args, found, G = run.args, [], run.args.group_size
    for step in range(args.steps):
        chosen = dppo.problems_of(run.problems, step, args)
        samples = dppo.rollout(run, chosen, G, dppo.seed_of(args, "rollout", step))
        R = torch.tensor([s.R for s in samples])
        for s, A in zip(samples, dppo.group_advantages(R, G).tolist()):
            s.A = A
        cuts = [len(chosen) * i // args.minibatches * G for i in range(args.minibatches + 1)]
        last = [s for s in samples[cuts[-2] :] if s.A != 0]
        before = law(run, last) if last else None
        for a, b in zip(cuts, cuts[1:]):
            if b == cuts[-1] and last:
                found.append(compare(last, before, law(run, last), Ks))
            dppo.update(run.model, run.optimizer, samples[a:b], run.method, args)
        print(f"{label}: step {step}, reward {R.mean():.3f}, {len(last)} samples", file=sys.stderr)
    joined = {name: sum((f[name] for f in found), []) for name in found[0]}
    joined["token"] = run.tokenizer.convert_ids_to_tokens(joined["token"])
    return dict(kind="masks", label=label, method=args.method, Ks=[*Ks, "V"]) | joined


def compare(samples, logmu, logpi, Ks):
    """Laws (N, V) -> what one line of JSON holds of each token, as lists."""
    y = dppo.flat(samples, "y_ids", "cpu")[:, :1]
    A = torch.cat([torch.full((len(s.y_ids),), s.A) for s in samples])
    mu, pi = logmu.exp(), logpi.exp()
    row = dict(A=short(A), token=y[:, 0].tolist(), entropy=short(-(mu * logmu).sum(-1)))
    row |= dict(mu=short(mu.gather(-1, y)[:, 0]), pi=short(pi.gather(-1, y)[:, 0]))
    for K in Ks:
        top = logmu.topk(min(K, logmu.shape[-1]))
        y_ids, seen = dppo.slots(y, logmu.gather(-1, y), top.indices, top.values)
        p, q = seen.exp(), logpi.gather(-1, y_ids).masked_fill(seen == -dppo.INF, -dppo.INF).exp()
        rest = torch.minimum(dppo.with_rest(p)[:, -1], dppo.with_rest(q)[:, -1])
        row |= {f"tv_{K}": short(dppo.tv(p, q)), f"rest_{K}": short(rest)}
    return row | dict(tv_V=short((mu - pi).abs().sum(-1) / 2), rest_V=[0.0] * len(y))


def main():
    parser = argparse.ArgumentParser("python -m toy.tokens", allow_abbrev=False)
    parser.add_argument(
        "--label", required=True, help="names the model; replaces its lines in --out"
    )
    parser.add_argument("--dtypes", default="float32,bfloat16", help="engines to compare")
    parser.add_argument("--out", type=Path, default=Path("runs/tokens.jsonl"))
    mine, flags = parser.parse_known_args()
    mine.out.parent.mkdir(parents=True, exist_ok=True)
    if "--model" in flags and "--dataset" not in flags:
        file = Path(tempfile.mkdtemp(), "word_problems.jsonl")
        file.write_text("".join(json.dumps(row) + "\n" for row in word_problems(300)))
        flags += ["--dataset", str(file)]
    rows = [json.loads(line) for line in open(mine.out)] if mine.out.exists() else []
    rows = [row for row in rows if row["label"] != mine.label]
    for dtype in mine.dtypes.split(","):
        run = dppo.start(dppo.parse_args([*flags, "--engine-dtype", dtype]), dppo.Signals())
        rows.append(equal_weights(run, mine.label, dtype))
        if dtype == "float32":
            rows.append(last_minibatches(run, mine.label))
        run.grader.close()
        run.claimed.close()
    mine.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
