"""Check every statement of theory.md on small MDPs and print one table.

    python -m toy                    # the table; exits with 1 if a statement fails
    python -m toy --plot FILE.png    # |Delta| under its penalties (needs matplotlib)

Instances are exact (fractions): an equality means ==, a bound means <=, with no tolerance.
"Tightness" is the largest |Delta| / penalty, on random instances and on instances that gradient
ascent over both policies finds against one penalty, each with its worst reward.
"""

import argparse
import random
import sys
from fractions import Fraction
from itertools import product
from math import prod

import numpy as np

from toy import mdp as m


def statements(mdp, mu, pi):
    """{statement: (left, relation, right)} on one instance."""
    T, change = len(mdp.R), m.J(mdp, pi) - m.J(mdp, mu)
    surrogate, delta = m.surrogate(mdp, mu, pi), m.delta(mdp, mu, pi)
    D, expected, steps = (f(mdp, mu, pi) for f in (m.D_max, m.expected_TV, m.step_TV))
    xi, xi_star = m.xi(mdp, mu), m.xi_star(mdp, mu)
    enumerated = m.surrogate_by_enumeration(mdp, mu, pi), m.delta_by_enumeration(mdp, mu, pi)
    shifted = mdp._replace(R=mdp.R.copy())
    shifted.R[-1] += 7
    after_shift = m.surrogate_by_enumeration(shifted, mu, pi), m.delta(shifted, mu, pi)
    return {
        "3.1: J(pi)-J(mu) = L'-Delta, enumerated": (change, "=", enumerated[0] - enumerated[1]),
        "3.1 by dynamic programming": (change, "=", surrogate - delta),
        "Delta: enumeration = occupancies": (enumerated[1], "=", delta),
        "baseline: L', Delta unmoved by R - b": (after_shift, "=", (surrogate, delta)),
        "sequence TV <= sum of expected TVs": (m.sequence_TV(mdp, mu, pi), "<=", expected),
        "(7)": (abs(delta), "<=", m.penalty_7(xi, T, D)),
        "(7) with xi*": (abs(delta), "<=", m.penalty_7(xi_star, T, D)),
        "(8)": (abs(delta), "<=", m.penalty_8(xi, expected)),
        "(8) with xi*": (abs(delta), "<=", m.penalty_8(xi_star, expected)),
        "coupling bound": (abs(delta), "<=", m.penalty_coupling(xi_star, T, D)),
        "sharp bound, D_max": (abs(delta), "<=", m.penalty_sharp(xi_star, T, D)),
        "sharp bound, one D per step": (abs(delta), "<=", m.penalty_steps(xi_star, steps)),
        "sharp bound, expected TV": (abs(delta), "<=", m.penalty_expected(xi_star, expected)),
        "overlap bound": (abs(delta), "<=", m.penalty_overlap(mdp, mu, pi)),
    }


def certificate_statements(rng):
    n = rng.randint(2, 6)
    mu, pi = m.random_law(rng, n), m.random_law(rng, n)
    low, high = m.certificate(mu, pi, rng.sample(range(n), rng.randint(1, n)))
    exact = m.D_TV(mu, pi)
    return {
        "top-K TV <= TV": (low, "<=", exact),
        "TV <= top-K TV + min(tails)": (exact, "<=", high),
    }


def discounted_statement(world):
    g = 0.9
    change, gain, xi, D = m.discounted(*world[:3], g, *world[3:])
    penalty = 4 * xi * g / (1 - g) ** 2 * D**2
    return {"2.1 with constant 4, discount 0.9": (abs(gain - change), "<=", penalty)}


def random_discounted(rng, S=4, n_actions=3):
    P, mu, pi = (rng.dirichlet(np.ones(n), (S, n_actions)) for n in (S, n_actions, n_actions))
    mu, share = mu[:, 0], rng.uniform(0, 0.3)
    R = rng.normal(size=(S, n_actions))
    return rng.dirichlet(np.ones(S)), P, R, mu, mu + share * (pi[:, 0] - mu)


def worst_discounted(D):
    """theory.md#thm-2-1: pi leaks out of state 0 and gains there what it loses in state 1."""
    P = np.zeros((2, 3, 2))
    P[0, :2, 0] = P[0, 2, 1] = P[1, :, 1] = 1
    R = np.array([[-1.0, 1, 1], [1, -1, -1]])
    mu = np.array([[0.5, 0.5, 0], [0.5, 0.5, 0]])
    return np.array([1.0, 0]), P, R, mu, mu + D * np.array([[-1.0, 0, 1], [-1, 1, 0]])


def large_statement(rng, S=50, n_actions=4, T=50):
    """float64 by dynamic programming at a size that no enumeration reaches."""
    P = rng.dirichlet(np.ones(S), (S, n_actions))
    mu, other = rng.dirichlet(np.ones(n_actions), (2, T, S))
    mdp = m.MDP(np.ones(S) / S, P, rng.uniform(-1, 1, (T, S, n_actions)))
    pi = mu + 0.2 * (other - mu)
    error = m.J(mdp, pi) - m.J(mdp, mu) - m.surrogate(mdp, mu, pi) + m.delta(mdp, mu, pi)
    return {"3.1 in float64, S = T = 50": (abs(error), "<=", 1e-10)}


# Adversarial instances


def ascend(T, penalty, vocab=3, restarts=6, steps=250):
    """Gradient ascent on log(worst |Delta| / penalty(D_max, steps, expected)); exact tables."""
    import torch

    torch.manual_seed(0)
    y = torch.tensor(list(product(range(vocab), repeat=T)))  # (n, T)
    first = [sum(vocab**n for n in range(t)) for t in range(T + 1)]  # step t's first prefix
    rank = [sum((y[:, j] * vocab ** (t - 1 - j) for j in range(t)), y[:, 0] * 0) for t in range(T)]
    prefix = torch.stack([first[t] + rank[t] for t in range(T)], 1)  # (n, T)
    logits = torch.randn(2, restarts, first[T], vocab, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(steps):
        mu, pi = logits.softmax(-1)
        p, q = mu[:, prefix, y], pi[:, prefix, y]  # (restarts, n, T)
        size = (p.prod(-1) * (1 + (q / p - 1).sum(-1)) - q.prod(-1)).abs().sum(-1)
        tv = (mu - pi).abs().sum(-1) / 2
        by_step = [tv[:, first[t] : first[t + 1]].amax(-1) for t in range(T)]
        expected = (p.prod(-1) * tv[:, prefix].sum(-1)).sum(-1)
        score = size.log() - penalty(tv.amax(-1), by_step, expected).log()
        optimizer.zero_grad()
        (-score.sum()).backward()
        optimizer.step()
    return [exact(table[score.argmax()].detach().numpy()) for table in (mu, pi)]


def exact(table):
    """Nearby Fractions, each row summing to exactly 1."""
    rounded = [[Fraction(max(1, round(p * 10**7))) for p in row] for row in table]
    return np.array([[p / sum(row) for p in row] for row in rounded], dtype=object)


def with_worst_reward(T, mu, pi):
    """The prefix-tree instance whose reward is the sign that makes |Delta| largest."""
    prefixes = m.prefix_tree(mu.shape[1], T, lambda y: Fraction(0))[1]
    index = {y: s for s, y in enumerate(prefixes)}

    def reward(y):
        ratios = [pi[index[y[:t]], a] / mu[index[y[:t]], a] for t, a in enumerate(y)]
        return Fraction(1 if 1 + sum(r - 1 for r in ratios) >= prod(ratios) else -1)

    mdp, _ = m.prefix_tree(mu.shape[1], T, reward)
    return mdp, m.on_tree(mdp, mu), m.on_tree(mdp, pi)


def adversarial(T):
    """Yield the instances found against each penalty, then the pair that theory.md#sharp gives."""
    for penalty in (
        lambda D, steps, expected: m.penalty_7(1, T, D),
        lambda D, steps, expected: m.penalty_coupling(1, T, D),
        lambda D, steps, expected: m.penalty_sharp(1, T, D),
        lambda D, steps, expected: m.penalty_steps(1, steps),
        lambda D, steps, expected: m.penalty_expected(1, expected),
    ):
        yield with_worst_reward(T, *ascend(T, penalty))
    mu, pi = m.extremal_policies(Fraction(1, 100), Fraction(1, 10**6))
    rows = len(m.prefix_tree(3, T, lambda y: Fraction(0))[1])
    yield with_worst_reward(T, np.array([mu] * rows), np.array([pi] * rows))


# The table


def record(table, found, column="random"):
    """Add one instance's statements to {statement: its row}."""
    for name, (left, relation, right) in found.items():
        equal = relation == "="
        holds = left == right if equal else left <= right
        slack = float(not holds) if equal else float(right - left)
        row = table.setdefault(name, {"instances": 0, "failures": 0, "slack": slack, "tight": {}})
        row["instances"] += 1
        row["failures"] += not holds
        row["slack"] = (max if equal else min)(row["slack"], slack)
        if not equal and right > 0:
            row["tight"][column] = max(row["tight"].get(column, 0), float(left / right))


def run(instances, horizons=(2, 3)):
    rng, floats, table = random.Random(0), np.random.default_rng(0), {}
    for i in range(instances):
        record(table, statements(*m.random_instance(rng, tree=i % 2 == 0)))
    for T in horizons:
        for instance in adversarial(T):
            record(table, statements(*instance), f"T = {T}")
    for _ in range(instances):
        record(table, certificate_statements(rng))
        record(table, discounted_statement(random_discounted(floats)))
    for D in (0.001, 0.01, 0.1):
        record(table, discounted_statement(worst_discounted(D)), "T = inf")
    record(table, large_statement(floats))
    return table


def show(table):
    columns = ["random", "T = 2", "T = 3", "T = inf"]
    print(f"{'':67}{'tightness: adversarial at':>40}")
    print(f"{'statement':<40}{'instances':>10}{'worst slack':>13}", end="")
    print("".join(f"{c:>10}" for c in columns), " holds")
    for name, row in table.items():
        tight = [f"{row['tight'][c]:.6f}" if row["tight"].get(c) else "-" for c in columns]
        print(f"{name:<40}{row['instances']:>10}{row['slack']:>13.3g}", end="")
        print("".join(f"{x:>10}" for x in tight), " no" if row["failures"] else " yes")


# The figure


def random_point(rng, T):
    """(D_max, |Delta| / xi*) of a random MDP with a reward at the end, in float64."""
    S, n_actions = 8, 4
    mu, other = rng.dirichlet(np.ones(n_actions) / 2, (2, T, S))
    R = np.zeros((T, S, n_actions))
    R[-1] = rng.choice([-1.0, 1.0], (S, n_actions))
    mdp = m.MDP(np.ones(S) / S, rng.dirichlet(np.ones(S) / 8, (S, n_actions)), R)
    pi = mu + 10 ** rng.uniform(-3.3, 0) * (other - mu)
    return m.D_max(mdp, mu, pi), abs(m.delta(mdp, mu, pi))


def plot(path):
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("--plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    # every penalty at xi* = 1 for policies whose TV is D in every state (expected TV is then T D)
    curves = {
        "penalty (7)": (lambda T, D: m.penalty_7(1, T, D), "#c44e52", "--"),
        "penalty (8)": (lambda T, D: m.penalty_8(1, T * D), "#dd8452", "-."),
        "coupling bound": (lambda T, D: m.penalty_coupling(1, T, D), "#4c72b0", "-"),
        "sharp bound": (lambda T, D: m.penalty_sharp(1, T, D), "#2f8f4e", "-"),
    }
    worst = {"marker": "o", "ls": "", "ms": 4.5, "mfc": "none", "mec": "k"}
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(2, 3, figsize=(10.5, 6.2), constrained_layout=True)
    rng, eps = np.random.default_rng(0), 1e-9
    for ax, T in zip(axes.flat, (2, 4, 8, 64), strict=False):
        D = np.geomspace(1e-3, 0.999, 120)
        dots = np.array([random_point(rng, T) for _ in range(150)])
        ax.plot(*dots.T, ".", ms=3, color="0.72", label=r"actual $|\Delta|$, random MDPs")
        for name, (penalty, color, dash) in curves.items():
            ax.plot(D, [penalty(T, d) for d in D], dash, color=color, lw=1.7, label=name)
        some = D[::9]
        ax.plot(
            some,
            [m.extremal_delta(T, d, eps) for d in some],
            label=r"actual $|\Delta|$, worst policies and reward",
            **worst,
        )
        ax.set(xscale="log", yscale="log", xlim=(1e-3, 1), title=f"T = {T}")
        ax.set_ylim(m.penalty_7(1, T, 1e-3) / 20, 2 * m.penalty_7(1, T, 1))
        ax.set(xlabel=r"$D_{\max}$", ylabel=r"size for $\xi^* = 1$")
    axes.flat[0].text(0.95, 4e-7, "(7), coupling and sharp coincide", ha="right", fontsize=8)
    ax, D = axes.flat[4], 0.01
    T = np.unique(np.geomspace(2, 10_000, 120).astype(int))
    for penalty, color, dash in curves.values():
        ax.plot(T, [penalty(int(t), D) for t in T], dash, color=color, lw=1.7)
    few = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    ax.plot(few, [m.extremal_delta(t, D, eps) for t in few], **worst)
    ax.axhline(2, color="0.5", lw=0.8, ls=":")
    ax.text(1.2e4, 2.3, r"range of $J$: $2\xi^*$", ha="right", fontsize=8, color="0.35")
    ax.set(xscale="log", yscale="log", xlabel="T, the length of a response")
    ax.set(title=r"$D_{\max}$ = 0.01", ylabel=r"size for $\xi^* = 1$")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    axes.flat[5].axis("off")
    axes.flat[5].legend(handles, labels, loc="center", frameon=False, fontsize=10)
    figure.savefig(path, dpi=120)
    return 0


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m toy", description=__doc__.split("\n")[0])
    parser.add_argument("--plot", metavar="FILE.png", help="draw the figure instead of the table")
    parser.add_argument("--instances", type=int, default=400, help="random MDPs to check")
    args = parser.parse_args(argv)
    if args.plot:
        return plot(args.plot)
    table = run(args.instances)
    show(table)
    return int(any(row["failures"] for row in table.values()))


if __name__ == "__main__":
    sys.exit(main())
