"""The quantities of theory.md on a tabular MDP with a finite horizon, one function per quantity.

Everything here works on numpy arrays of `fractions.Fraction` (dtype object: equalities are exact)
and of float64 (fast: 50 states and 50 steps take milliseconds). Axes: T steps, S states, A actions.
A policy is an array (T, S, A); steps are counted from 0 here and from 1 in theory.md.
theory.md#setting
"""

from fractions import Fraction
from itertools import product
from math import comb, prod
from typing import NamedTuple

import numpy as np


class MDP(NamedTuple):
    rho: np.ndarray  # (S,)       law of the first state
    P: np.ndarray  # (S, A, S)  P[s, a, s']
    R: np.ndarray  # (T, S, A)  reward of a step; a trajectory's reward R(y) is the sum


def prefix_tree(vocab, T, reward, eos=None):
    """The LLM's MDP: a state is a prefix, a step appends a token, `reward(y)` comes at the end.

    Returns the MDP and the list of prefixes (state i is prefix i). The last state is absorbing: a
    response that is over, by `eos` or by length, waits there with action 0, so its ratios are 1.
    """
    tokens = [a for a in range(vocab) if a != eos]
    prefixes = [y for n in range(T) for y in product(tokens, repeat=n)]
    index = {y: s for s, y in enumerate(prefixes)}
    over = len(prefixes)
    zero, one = Fraction(0), Fraction(1)
    rho = np.array([one] + [zero] * over, dtype=object)
    P = np.full((over + 1, vocab, over + 1), zero, dtype=object)
    R = np.full((T, over + 1, vocab), zero, dtype=object)
    P[over, :, over] = one
    for y, s in index.items():
        for a in range(vocab):
            longer = (*y, a)
            P[s, a, index.get(longer, over)] = one
            if longer not in index:
                R[len(y), s, a] = reward(longer)
    return MDP(rho, P, R), prefixes


def on_tree(mdp, table):
    """A policy (T, S, A) from one distribution per prefix (S - 1, A), the same at every step."""
    T, S, A = mdp.R.shape
    waiting = np.array([[table[0, 0] * 0 + (a == 0) for a in range(A)]], dtype=table.dtype)
    return np.broadcast_to(np.concatenate([table, waiting]), (T, S, A))


# Values and occupancies, by dynamic programming


def Q(mdp, pi):
    """(T, S, A): expected reward from step t on, after action a in state s, then following pi."""
    values = mdp.R * 0
    ahead = mdp.rho * 0
    for t in reversed(range(len(mdp.R))):
        values[t] = mdp.R[t] + mdp.P @ ahead
        ahead = (pi[t] * values[t]).sum(-1)
    return values


def V(mdp, pi):
    return (pi * Q(mdp, pi)).sum(-1)  # (T, S)


def A(mdp, pi):
    return Q(mdp, pi) - V(mdp, pi)[..., None]  # (T, S, A)


def J(mdp, pi):
    return mdp.rho @ V(mdp, pi)[0]


def occupancy(mdp, pi):
    """(T, S): d_t, the law of the state at step t under pi."""
    laws = [mdp.rho]
    for t in range(len(mdp.R) - 1):
        laws.append(np.tensordot(laws[-1][:, None] * pi[t], mdp.P, 2))
    return np.stack(laws)


def gap(mdp, mu, pi):
    """(T, S): sum_a (pi - mu)(a|s) Q^mu(s, a), the one-step gain of pi over mu."""
    return ((pi - mu) * Q(mdp, mu)).sum(-1)


def surrogate(mdp, mu, pi):
    """L' as a sum over mu's occupancy.  theory.md#thm-3-1"""
    return (occupancy(mdp, mu) * gap(mdp, mu, pi)).sum()


def delta(mdp, mu, pi):
    """Delta as a difference of occupancies.  theory.md#delta-dp"""
    return ((occupancy(mdp, mu) - occupancy(mdp, pi)) * gap(mdp, mu, pi)).sum()


# The same by enumerating trajectories, straight from the formulas of Theorem 3.1


def trajectories(mdp, mu, pi):
    """Yield (mu's probability, [r_1 .. r_T], R(y)) for each trajectory y that mu can produce.

    Transitions are common to mu and pi, so they enter the probability and cancel in the ratios.
    """
    require_support(mdp, mu, pi)
    T, S, n_actions = mdp.R.shape

    def walk(t, s, p, ratios, total):
        if t == T:
            yield p, ratios, total
            return
        for a in range(n_actions):
            if mu[t, s, a] == 0:
                continue
            so_far = ratios + [pi[t, s, a] / mu[t, s, a]], total + mdp.R[t, s, a]
            if t == T - 1:  # where the last step leads is never seen
                yield p * mu[t, s, a], *so_far
                continue
            for after in range(S):
                if mdp.P[s, a, after] != 0:
                    yield from walk(t + 1, after, p * mu[t, s, a] * mdp.P[s, a, after], *so_far)

    for s in range(S):
        if mdp.rho[s] != 0:
            yield from walk(0, s, mdp.rho[s], [], 0)


def require_support(mdp, mu, pi):
    """Theorem 3.1 needs pi << mu: a ratio with mu = 0 below it is undefined.  theory.md#support"""
    reached = occupancy(mdp, mu)[..., None] > 0
    bad = np.argwhere(reached & (mu == 0) & (pi > 0))
    if len(bad):
        t, s, a = bad[0]
        raise ValueError(f"pi puts mass where mu has none: step {t}, state {s}, action {a}")


def surrogate_by_enumeration(mdp, mu, pi):
    return sum(p * R * sum(r - 1 for r in ratios) for p, ratios, R in trajectories(mdp, mu, pi))


def delta_by_enumeration(mdp, mu, pi):
    """E_mu[R(y) sum_t (r_t - 1)(1 - prod_{j>t} r_j)].  theory.md#thm-3-1"""
    total = 0
    for p, ratios, R in trajectories(mdp, mu, pi):
        after = 1  # prod_{j>t} r_j, built from the last step backwards
        for r in reversed(ratios):
            total += p * R * (r - 1) * (1 - after)
            after *= r
    return total


def J_by_enumeration(mdp, mu, pi):
    """J(pi) from mu's trajectories, reweighted."""
    return sum(p * prod(ratios) * R for p, ratios, R in trajectories(mdp, mu, pi))


def worst_delta(mdp, mu, pi):
    """sup of |Delta| over all rewards R(y) in [-1, 1].  theory.md#worst-reward"""
    return sum(
        p * abs(1 + sum(r - 1 for r in ratios) - prod(ratios))
        for p, ratios, _ in trajectories(mdp, mu, pi)
    )


# Divergences


def D_TV(mu, pi):
    return abs(mu - pi).sum(-1) / 2  # (T, S) from (T, S, A)


def step_TV(mdp, mu, pi):
    """(T,): the largest TV among the states that mu reaches at step t."""
    return np.where(occupancy(mdp, mu) > 0, D_TV(mu, pi), mdp.rho[0] * 0).max(-1)


def D_max(mdp, mu, pi):
    return step_TV(mdp, mu, pi).max()


def expected_TV(mdp, mu, pi):
    """E_{y~mu} sum_t D_TV(mu(.|s_t), pi(.|s_t))."""
    return (occupancy(mdp, mu) * D_TV(mu, pi)).sum()


def sequence_TV(mdp, mu, pi):
    """D_TV between the laws of whole trajectories.  theory.md#lemma-tv"""
    return sum(p * abs(1 - prod(ratios)) for p, ratios, _ in trajectories(mdp, mu, pi)) / 2


def certificate(mu, pi, named):
    """Bounds (low, high) on D_TV(mu, pi) from the outcomes in `named`.  theory.md#certificate"""
    m, p = 1 - sum(mu[a] for a in named), 1 - sum(pi[a] for a in named)  # masses of the rest
    low = (sum(abs(mu[a] - pi[a]) for a in named) + abs(m - p)) / 2
    return low, low + min(m, p)


# Rewards' sizes and the penalties: each bounds |Delta|, so J(pi) - J(mu) >= L' - penalty


def reward_range(mdp, mu):
    """(least, largest) R(y) among the trajectories that mu can produce."""

    def largest(R):
        never = -(1 + abs(R).sum())  # what cannot happen loses against every sum of rewards
        ahead = mdp.rho * 0
        for t in reversed(range(len(R))):
            after = np.where(mdp.P > 0, ahead, never).max(-1)
            ahead = np.where(mu[t] > 0, R[t] + after, never).max(-1)
        return np.where(mdp.rho > 0, ahead, never).max()

    return -largest(-mdp.R), largest(mdp.R)


def xi(mdp, mu):
    low, high = reward_range(mdp, mu)
    return max(abs(low), abs(high))


def xi_star(mdp, mu):
    """What is left of xi after the best constant baseline.  theory.md#baseline"""
    low, high = reward_range(mdp, mu)
    return (high - low) / 2


def penalty_7(xi, T, D):
    return 2 * xi * T * (T - 1) * D**2  # theory.md#eq-7


def penalty_8(xi, expected):
    return 4 * xi * expected  # theory.md#eq-8


def penalty_coupling(xi_star, T, D):
    return 4 * xi_star * (T * D - 1 + (1 - D) ** T)  # theory.md#coupling


def penalty_sharp(xi_star, T, D):
    return 2 * xi_star * T * D * (1 - (1 - D) ** (T - 1))  # theory.md#sharp


def penalty_steps(xi_star, D):
    """The sharp penalty with one divergence per step, D (T,).  theory.md#sharp-steps"""
    others = [prod([1 - d for j, d in enumerate(D) if j != t]) for t in range(len(D))]
    return 2 * xi_star * sum(d * (1 - o) for d, o in zip(D, others, strict=True))


def penalty_expected(xi_star, expected):
    return 2 * xi_star * expected  # theory.md#sharp-expected


def penalty_overlap(mdp, mu, pi):
    """Every state's own divergence, less what mu and pi still share there.  theory.md#overlap"""
    stays = 1 - step_TV(mdp, mu, pi)
    after = np.array([prod(stays[t + 1 :]) for t in range(len(stays))])[:, None]
    shared = occupancy(mdp, np.minimum(mu, pi))  # law of s_t where both agreed all the way
    return 2 * xi_star(mdp, mu) * (D_TV(mu, pi) * (occupancy(mdp, mu) - after * shared)).sum()


# The pair of policies that attains the sharp penalty as eps -> 0


def extremal_policies(D, eps):
    """Three tokens: mu almost never plays the first, pi moves the second's mass D onto it."""
    zero = D * 0
    return np.array([eps, D, 1 - D - eps]), np.array([eps + D, zero, 1 - D - eps])


def extremal_delta(T, D, eps):
    """worst_delta of T independent draws from `extremal_policies`, by counting tokens."""
    total = D * 0
    for up in range(T + 1):
        for down in range(T + 1 - up):
            ways = comb(T, up) * comb(T - up, down) * (1 - D - eps) ** (T - up - down)
            first_order = eps**up * D**down * (1 - down)  # mu(y) (1 + sum_t (r_t - 1))
            if up:
                first_order += up * eps ** (up - 1) * D ** (down + 1)
            total += ways * abs(first_order - (0 if down else (eps + D) ** up))
    return total


# Theorem 2.1's world: no horizon, a discount g < 1, stationary policies (S, A), float64


def discounted(rho, P, R, g, mu, pi):
    """(eta(pi) - eta(mu), surrogate gain, xi = max |A^mu|, D_max).  theory.md#thm-2-1"""
    eye = np.eye(len(rho))

    def kernel(p):
        return np.einsum("sa,sax->sx", p, P)

    def value(p):
        return np.linalg.solve(eye - g * kernel(p), (p * R).sum(-1))

    advantage = R + g * P @ value(mu) - value(mu)[:, None]
    visits = np.linalg.solve(eye - g * kernel(mu).T, rho)  # sum_t g^t d_t, which is rho^mu / (1-g)
    gain = visits @ (pi * advantage).sum(-1)
    return rho @ (value(pi) - value(mu)), gain, abs(advantage).max(), D_TV(mu, pi).max()


# Random instances, exact


def random_law(rng, n, support=None):
    """n Fractions that sum to 1, zero outside `support` and often inside it."""
    support = range(n) if support is None else support
    weights = [rng.randint(0, 4) if a in support else 0 for a in range(n)]
    weights[rng.choice(list(support))] += 1
    return np.array([Fraction(w, sum(weights)) for w in weights], dtype=object)


def random_instance(rng, tree=False, steps=3):
    """(mdp, mu, pi) with pi << mu: zeros in both, pi sometimes equal to mu or deterministic."""
    T, n_actions, S = rng.randint(1, steps), rng.randint(1, 3), rng.randint(1, 3)

    def number():
        return Fraction(rng.randint(-6, 6), 2)

    if tree:
        mdp, prefixes = prefix_tree(n_actions, T, lambda y: number(), rng.choice([None, 0]))
        rows = len(prefixes)
    else:
        P = np.stack([[random_law(rng, S) for _ in range(n_actions)] for _ in range(S)])
        R = np.vectorize(lambda _: number(), otypes=[object])(np.zeros((T, S, n_actions)))
        if rng.randint(0, 1):
            R[:-1] *= 0  # a reward at the end only
        mdp, rows = MDP(random_law(rng, S), P, R), T * S
    mu = np.stack([random_law(rng, n_actions) for _ in range(rows)])
    pi = np.stack([random_law(rng, n_actions, np.flatnonzero(row > 0)) for row in mu])
    kind = rng.choice(["any", "any", "near", "equal", "deterministic"])
    if kind == "near":
        pi = mu + (pi - mu) / 8
    elif kind == "equal":
        pi = mu
    elif kind == "deterministic":
        pi = pi * 0
        for row, old in zip(pi, mu, strict=True):
            row[rng.choice(list(np.flatnonzero(old > 0)))] += 1
    if tree:
        return mdp, on_tree(mdp, mu), on_tree(mdp, pi)
    return mdp, mu.reshape(T, S, n_actions), pi.reshape(T, S, n_actions)
