"""Draw the figures of toy/figures/ from the data beside them, and print their numbers.

    python -m toy.figures                needs matplotlib (tests/requirements.txt)

study.jsonl comes from `python -m toy.study`, tokens.jsonl from `python -m toy.tokens`.
"""

import json
from collections import Counter, defaultdict
from pathlib import Path

import torch

import dppo
from toy.study import BAD, DPPO, RELAXED, STABILITY, TOP_K

HERE = Path(__file__).parent / "figures"
DELTA = dppo.METHODS["dppo-binary-tv"].delta[0]

ENGINES = "vllm-bf16 5-bit 4-bit".split()  # in the order of their mismatch
PROBLEMS, SECOND = 891, 870  # the base model of the figures; the one that repeats some of its runs


def mean(values):
    return sum(values) / max(1, len(values))


def final(row):
    """Mean reward of the last 5 steps."""
    return mean(row["reward"][-5:])


def smooth(values, n=5):
    return [mean(values[max(0, i - n + 1) : i + 1]) for i in range(len(values))]


def band(axis, x, runs, method, **style):
    """The mean over seeds as a line, dashed if the anchor is recomputed; a band from the lowest
    seed to the highest."""
    length = min(map(len, runs))
    columns = [*zip(*(run[:length] for run in runs))]
    dashed = dppo.METHODS[method.split()[0]].anchor == "recomputed"
    style |= dict(label=method, ls="--" if dashed else "-")
    (line,) = axis.plot(x[:length], [mean(c) for c in columns], **style)
    low, high = [min(c) for c in columns], [max(c) for c in columns]
    axis.fill_between(x[:length], low, high, color=line.get_color(), alpha=0.12, lw=0)


def fall(row):
    """From the best mean of 5 steps to the last."""
    return max(smooth(row["reward"])[4:]) - final(row)


def pick(study, lr=6e-4, engine="5-bit", steps=100, problems=PROBLEMS):
    """The rows of one condition; lr=None: at every learning rate."""
    rows = [row for row in study if row["problems"] == problems]
    rows = [row for row in rows if (row["engine"], row["steps"]) == (engine, steps)]
    return [row for row in rows if lr in (None, row["lr"])]


def by_method(rows, methods):
    """{method: its rows}, in the order given, for those that are there."""
    found = defaultdict(list)
    for row in rows:
        found[row["method"]].append(row)
    return {method: found[method] for method in methods if found[method]}


def table(title, rows, methods, columns):
    """One line a method: mean over seeds (lowest to highest) of each column."""
    print(f"\n{title}")
    for method, runs in by_method(rows, methods).items():
        print(f"  {method:<28}", end="")
        for name, value in columns.items():
            found = [value(row) for row in runs]
            print(f"{name} {mean(found):.4f} ({min(found):.4f} to {max(found):.4f})", end="  ")
        print(f"seeds: {len(runs)}")


def curves(axes, rows, methods, series):
    """series over the steps, one axis each."""
    steps = range(max(row["steps"] for row in rows))
    for axis, name in zip(axes, series):
        for method, runs in by_method(rows, methods).items():
            band(axis, steps, [smooth(row[name]) for row in runs], method)
        axis.set(xlabel="step (mean of 5)", title=series[name])
    axes[0].legend(fontsize=7)


def stability(plt, study, tokens):
    """Training reward against the learning rate, and over the steps of short and long runs."""
    rows = pick(study, lr=None)
    lrs = sorted({row["lr"] for row in rows if row["method"] == STABILITY[0]})
    figure, axes = plt.subplots(1, 3, figsize=(16, 4.5))
    for method, runs in by_method(rows, STABILITY).items():
        ends = defaultdict(dict)
        for row in runs:
            ends[row["seed"]][row["lr"]] = final(row)
        complete = [[end[lr] for lr in lrs] for end in ends.values() if len(end) == len(lrs)]
        band(axes[0], lrs, complete, method, marker="o")
    axes[0].set(xscale="log", xlabel="learning rate", title="training reward, last 5 steps")
    axes[0].set_xticks(lrs, [f"{lr:g}" for lr in lrs])
    axes[0].minorticks_off()
    axes[0].legend(fontsize=7)
    curves([axes[1]], pick(study), STABILITY, dict(reward="training reward at 6e-4"))
    long = pick(study, 3e-4, steps=200)
    curves([axes[2]], long, STABILITY, dict(reward="training reward at 3e-4, twice as long"))
    columns = dict(reward=final, fall=fall, blocked=lambda row: mean(row["blocked"]))
    columns |= dict(r_over_10=lambda row: mean([r > 10 for r in row["ratio_max"]]))
    first = [row["reward"][0] for row in pick(study, lrs[0]) if row["method"] == STABILITY[0]]
    print(f"reward of the first rollout: {mean(first):.3f} ({min(first):.3f} to {max(first):.3f})")
    for lr in lrs:
        table(f"stability, learning rate {lr:g}: last 5 steps", pick(study, lr), STABILITY, columns)
    table("stability, learning rate 3e-4, 200 steps: last 5 steps", long, STABILITY, columns)
    return figure


def engines(plt, study, tokens):
    """Does a larger mismatch between engine and trainer tell the methods apart?"""
    figure, axes = plt.subplots(1, 4, figsize=(21, 4.5))
    ends, names = defaultdict(lambda: defaultdict(list)), []
    for engine, axis in zip(ENGINES, axes[1:]):
        rows = [row for row in pick(study, engine=engine) if row["method"] in STABILITY]
        gap = mean([mean(row["gap_mean"]) for row in rows])
        names.append(f"{engine}\n|pi - mu| = {gap:.4f}")
        curves([axis], rows, STABILITY, dict(gap_mean=f"{engine}: mean |pi - mu|"))
        for row in sorted(rows, key=lambda row: row["seed"]):
            ends[row["method"]][engine].append(final(row))
        columns, count = dict(reward=final), len(rows)
        for name in ("gap_mean", "entropy"):
            columns[f"{name}_of_first_20"] = lambda row, name=name: mean(row[name][:20])
            columns[f"{name}_of_last_20"] = lambda row, name=name: mean(row[name][-20:])
        table(f"engine {engine}: reward of the last 5 steps, |pi - mu|", rows, STABILITY, columns)
        for name in ("gap_mean", "entropy"):
            ends_of = [(mean(row[name][:20]), mean(row[name][-20:])) for row in rows]
            start, end = map(mean, zip(*ends_of))
            grown = sum(last > first for first, last in ends_of)
            print(f"  {name}: {start:.4f} to {end:.4f}, grows in {grown} of {count} runs")
    for method in STABILITY:
        runs = [*zip(*(ends[method][engine] for engine in ENGINES))]
        band(axes[0], range(len(ENGINES)), runs, method, marker="o")
    axes[0].set_xticks(range(len(ENGINES)), names)
    axes[0].set(title="training reward at 6e-4, last 5 steps")
    return figure


def steps_to(row, target=0.9):
    """Rollouts until the mean of 5 reaches the target; infinite if it does not."""
    return next((i + 1 for i, R in enumerate(smooth(row["reward"])) if R >= target), dppo.INF)


def others(name, methods, series, **condition):
    """A figure of `series` over the steps for `methods`, in the condition of pick()."""

    def draw(plt, study, tokens):
        rows = pick(study, **condition)
        figure, axes = plt.subplots(1, len(series), figsize=(5.3 * len(series), 4.5))
        curves(axes, rows, methods, series)
        columns = {key: lambda row, key=key: mean(row[key][-5:]) for key in series}
        table(f"{name}: last 5 steps", rows, methods, columns)
        columns = {key: lambda row, key=key: mean(row[key]) for key in series}
        table(f"{name}: the whole run", rows, methods, columns)
        for method, runs in by_method(rows, methods).items():
            print(f"  {method:<28}steps to a reward of 0.9: {sorted(map(steps_to, runs))}")
        return figure

    return draw


def again(study):
    """Final rewards of the conditions that the second base model repeats."""
    repeated = {
        tuple(row[k] for k in ("engine", "lr", "steps")): 1
        for row in study
        if row["problems"] == SECOND
    }
    for engine, lr, steps in repeated:
        for problems in (PROBLEMS, SECOND):
            rows = pick(study, lr, engine, steps, problems)
            title = (
                f"base model of {problems} problems, {engine}, {lr:g}, {steps} steps: last 5 steps"
            )
            table(title, rows, STABILITY, dict(reward=final))


def mismatch(plt, study, tokens):
    """The paper's Figure 2: ratio and difference against mu, at equal weights."""
    rows = [row for row in tokens if row["kind"] == "mismatch"]
    figure, axes = plt.subplots(2, len(rows), figsize=(4.2 * len(rows), 7), squeeze=False)
    for row, column in zip(rows, axes.T):
        mu, change = (torch.tensor(row[name]) for name in ("mu", "change"))
        column[0].plot(mu, change / mu, ".", ms=2)
        column[1].plot(mu, change.abs(), ".", ms=2, color="C1")
        column[0].set(xscale="log", title=f"{row['label']}, vLLM {row['dtype']}", ylabel="r - 1")
        column[1].set(xscale="log", xlabel="mu(y_t)", ylabel="|pi - mu|")
        far = f"|pi - mu| {change.abs().mean():.1e} on average, at most {change.abs().max():.1e}"
        print(f"\nmismatch, {row['label']}, vLLM {row['dtype']}: {far}")
        print("  mu, and the means of |r - 1| and |pi - mu|:")
        edges = [0, 1e-3, 1e-2, 0.1, 0.5, 0.9, 1.01]
        for low, high in zip(edges, edges[1:]):
            at = (mu >= low) & (mu < high)
            if at.any():
                r, D = (change / mu).abs()[at].mean(), change.abs()[at].mean()
                print(f"  {low:>6g} to {min(1, high):<6g}{at.sum():>6} tokens  {r:.1e}  {D:.1e}")
    return figure


def masks(plt, study, tokens):
    """What the ratio clip and the TV mask block, token by token, and what K changes."""
    rows = [row for row in tokens if row["kind"] == "masks"]
    figure, axes = plt.subplots(1, 2 * len(rows), figsize=(5.3 * 2 * len(rows), 4.5))
    for i, row in enumerate(rows):
        A, mu, pi = (torch.tensor(row[name]) for name in ("A", "mu", "pi"))
        data = A, mu[:, None], pi[:, None]
        clip, binary = (~dppo.keep_mask(*data, dppo.METHODS[m]) for m in ("grpo", "dppo-binary-tv"))
        axis, entropy, TV = axes[2 * i], torch.tensor(row["entropy"]), torch.tensor(row["tv_V"])
        for at, text in [
            (~clip & ~binary, "kept by both"),
            (clip & ~binary, "blocked by the clip only"),
            (~clip & binary, "blocked by the TV only"),
            (clip & binary, "blocked by both"),
        ]:
            axis.plot(mu[at], (pi - mu).abs()[at], ".", ms=3, label=f"{text}: {at.sum()}")
            if at.any():
                tell = f"mean mu {mu[at].mean():.3f}, {(mu[at] < 0.1).sum()} below 0.1, "
                tell += f"mean |pi - mu| {(pi - mu).abs()[at].mean():.3f}, "
                tell += f"mean entropy {entropy[at].mean():.2f}, {(A[at] < 0).sum()} with A < 0, "
                tell += f"exact TV {TV[at].mean():.3f}, {(TV[at] > DELTA).sum()} above {DELTA}"
                most = Counter(t for t, a in zip(row["token"], at.tolist()) if a).most_common(8)
                print(f"masks, {row['label']}, {text}: {at.sum()} tokens, {tell}; {most}")
        axis.set(xscale="log", xlabel="mu(y_t)", ylabel="|pi - mu|", title=row["label"])
        axis.legend(fontsize=7)
        away = A.sign() * (pi - mu) > 0
        exact, Ks = TV > DELTA, row["Ks"]
        differ, certain = [], []
        blocked = (away & exact).float().mean()
        print(f"masks, {row['label']}: the exact TV blocks {blocked:.2%} of {len(A)} tokens")
        for K in Ks:
            D, rest = torch.tensor(row[f"tv_{K}"]), torch.tensor(row[f"rest_{K}"])
            missed = away & exact & ~(D > DELTA)
            known = (D > DELTA) | (D + rest <= DELTA)
            differ.append((away & ((D > DELTA) != exact)).float().mean().item())
            certain.append((~away | known).float().mean().item())
            print(
                f"  K = {K}: misses {missed.sum()} of {(away & exact).sum()}, another decision for"
            )
            print(f"    {differ[-1]:.2%}; certified for {certain[-1]:.2%}", end=", ")
            print(f"{known[away].float().mean():.2%} of those that move away")
        axis, x = axes[2 * i + 1], range(len(Ks))
        axis.plot(x, differ, "o-", label="decision differs from the exact TV's")
        axis.plot(x, [1 - c for c in certain], "s--", label="decision not certified")
        axis.axhline(blocked, color="gray", lw=0.8, label="blocked by the exact TV")
        axis.set_xticks(x, [str(K) for K in Ks])
        axis.set(xlabel="K", ylabel="share of tokens", title=f"{row['label']}: binary or top-K")
        axis.legend(fontsize=7)
    return figure


REWARD = dict(reward="training reward")
FIGURES = dict(
    stability=stability,
    engines=engines,
    bad_updates=others(
        "bad updates",
        ["pg-is", *BAD, "dppo-binary-tv"],
        REWARD | dict(bad_updates="bad updates (A < 0, mu - pi >= 0.5)"),
    ),
    efficiency=others(
        "efficiency",
        ["grpo", *RELAXED, *DPPO],
        REWARD | dict(entropy="entropy in nats", blocked="share of blocked tokens"),
        lr=3e-4,
        steps=200,
    ),
    top_k=others(
        "top-K",
        ["dppo-binary-tv", *TOP_K],
        REWARD | dict(blocked="share of blocked tokens"),
    ),
    mismatch=mismatch,
    masks=masks,
)


def main():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    study, tokens = (
        [json.loads(line) for line in open(HERE / f"{name}.jsonl")] for name in ("study", "tokens")
    )
    again(study)
    for name, draw in FIGURES.items():
        figure = draw(plt, study, tokens)
        figure.tight_layout()
        figure.savefig(HERE / f"{name}.png", dpi=100)
        print(HERE / f"{name}.png")


if __name__ == "__main__":
    main()
