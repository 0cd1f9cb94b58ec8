"""Draw the figures of toy/figures/ from the data beside them.

python -m toy.figures                needs matplotlib (tests/requirements.txt)
"""

import json
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent / "figures"


def mean(values):
    return sum(values) / len(values)


def final(row):
    """Mean reward of the last 5 steps; of a run that was stopped, of its last."""
    return mean(row["reward"][-5:])


def smooth(values, n=5):
    return [mean(values[max(0, i - n + 1) : i + 1]) for i in range(len(values))]


def band(axis, x, runs, **style):
    """The mean over seeds as a line, from the lowest to the highest seed as a band."""
    columns = [*zip(*runs)]
    (line,) = axis.plot(x, [mean(c) for c in columns], **style)
    low, high = [min(c) for c in columns], [max(c) for c in columns]
    axis.fill_between(x, low, high, color=line.get_color(), alpha=0.15, lw=0)


def stability(rows):
    """Reward at the end against the learning rate, and over the steps at each learning rate."""
    from matplotlib import pyplot as plt

    lrs = sorted({row["lr"] for row in rows})
    methods = [*dict.fromkeys(row["method"] for row in sorted(rows, key=lambda r: -final(r)))]
    seeds = len({row["seed"] for row in rows})
    figure, axes = plt.subplots(1, 1 + len(lrs), figsize=(4 * (1 + len(lrs)), 4), sharey=True)
    by = defaultdict(list)
    for row in rows:
        by[row["method"], row["lr"]].append(row)
    for i, method in enumerate(methods):
        style = dict(color=f"C{i}", label=method)
        columns = [[final(row) for row in by[method, lr]] for lr in lrs]
        band(axes[0], lrs, [*zip(*columns)], marker="o", **style)
        for axis, lr in zip(axes[1:], lrs):
            runs = [smooth(row["reward"]) for row in by[method, lr]]
            length = min(map(len, runs))
            band(axis, range(length), [run[:length] for run in runs], **style)
            axis.set(title=f"learning rate {lr:g}", xlabel="step (mean of 5)")
    axes[0].set(xscale="log", xlabel="learning rate", ylabel="training reward")
    axes[0].set(title=f"last 5 steps; band: {seeds} seeds", xticks=lrs)
    axes[0].set_xticks(lrs, [f"{lr:g}" for lr in lrs], minor=False)
    axes[0].minorticks_off()
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    return figure


def main():
    import matplotlib

    matplotlib.use("Agg")
    for name, draw in dict(stability=stability).items():
        rows = [json.loads(line) for line in open(HERE / "study.jsonl")]
        draw(rows).savefig(HERE / f"{name}.png", dpi=110)
        print(HERE / f"{name}.png")


if __name__ == "__main__":
    main()
