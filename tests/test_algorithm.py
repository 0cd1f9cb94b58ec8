"""Advantages, distances, masks and the loss: hand-computed values and independent slow loops."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dppo
from dppo import METHODS, Method, group_advantages, keep_mask, kl, policy_loss, ratio, tv

EPS32 = 2e-7  # a few units in the last place of a float32 near 1


def laws(seed, n, V, spread=3.0, move=1.0, dtype=torch.float32):
    """n random pairs of full distributions mu, pi (n, V)"""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, V, generator=g, dtype=torch.float64) * spread
    moved = z + torch.randn(n, V, generator=g, dtype=torch.float64) * move
    mu, pi = z.softmax(-1), moved.softmax(-1)
    return mu.to(dtype), pi.to(dtype)


def listed(mu, pi, y, K):
    """The (n, 1+K) probabilities that an engine with top K reports for sampled tokens y (n,)."""
    y_ids, logmu = dppo.slots(
        y[:, None], mu.log().gather(-1, y[:, None]), mu.topk(K).indices, mu.log().topk(K).values
    )
    return logmu.exp(), pi.gather(-1, y_ids).masked_fill(logmu == -math.inf, 0.0), y_ids


# ---------------------------------------------------------------------------------- advantages


def test_advantage_is_reward_minus_group_mean():
    A = group_advantages(torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0]), 4)
    assert A.tolist() == [0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5]
    assert A.dtype == torch.float32


def test_normalize_std_divides_by_the_population_standard_deviation():
    A = group_advantages([1.0, 0, 0, 0], 4, normalize_std=True)  # std = sqrt(3)/4
    assert torch.allclose(A, torch.tensor([3.0, -1, -1, -1]) / 3**0.5)


@pytest.mark.parametrize("normalize_std", [False, True])
@given(reward=st.floats(-1e6, 1e6), G=st.integers(2, 33))
def test_a_group_that_agrees_has_advantage_exactly_zero(normalize_std, reward, G):
    assert group_advantages([reward] * G, G, normalize_std).tolist() == [0.0] * G


@pytest.mark.parametrize("rewards", [[1.0, math.nan], [1.0, math.inf]])
def test_a_reward_that_is_not_finite_is_an_error(rewards):
    with pytest.raises(ValueError, match="not finite"):
        group_advantages(rewards, 2)


@pytest.mark.parametrize("rewards, G", [([1.0, 0.0], 1), ([1.0, 0.0, 1.0], 2)])
def test_groups_of_one_and_torn_groups_are_errors(rewards, G):
    with pytest.raises(ValueError, match="groups of"):
        group_advantages(rewards, G)


# ---------------------------------------------------------------------------------- distances


def test_hand_computed_binary_distances():
    mu, pi = torch.tensor([[0.99], [0.5], [1e-4]]), torch.tensor([[0.80], [0.25], [1e-2]])
    assert torch.allclose(tv(mu, pi), torch.tensor([0.19, 0.25, 0.0099]), atol=EPS32)
    # 0.5 log(0.5/0.25) + 0.5 log(0.5/0.75) = 0.5 log(4/3)
    assert math.isclose(kl(mu, pi)[1].item(), 0.5 * math.log(4 / 3), abs_tol=1e-6)
    assert torch.allclose(ratio(mu, pi), torch.tensor([0.19 / 0.99, 0.5, 99.0]), rtol=1e-5)


def test_hand_computed_top_k_distance_with_the_sample_outside_the_top_k():
    # V = 4, K = 2, y = rank 4: the outcomes are y, rank 1, rank 2 and the rest (rank 3): K + 2
    mu, pi = torch.tensor([[0.4, 0.3, 0.2, 0.1]]), torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    m, p, _ = listed(mu, pi, torch.tensor([3]), 2)
    assert torch.allclose(m, torch.tensor([[0.1, 0.4, 0.3]]))
    assert math.isclose(tv(m, p).item(), (0.3 + 0.3 + 0.1 + 0.1) / 2, abs_tol=1e-6)
    # if y took the place of rank 2, ranks 2 and 3 would be pooled and cancel
    assert math.isclose(tv(m[:, :2], p[:, :2]).item(), 0.3, abs_tol=1e-6)


def test_a_sample_inside_the_top_k_counts_once():
    mu, pi = torch.tensor([[0.4, 0.3, 0.2, 0.1]]), torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    m, p, y_ids = listed(mu, pi, torch.tensor([0]), 2)
    assert m.tolist()[0][1] == 0.0 and y_ids.tolist() == [[0, 0, 1]]
    assert math.isclose(tv(m, p).item(), (0.3 + 0.1 + 0.4) / 2, abs_tol=1e-6)


def brute_force(mu, pi, named, distance):
    """float64, over the whole vocabulary, one position at a time, from the definition."""
    parts = [[i] for i in named] + [[i for i in range(len(mu)) if i not in named]]
    m, p = ([sum(float(x[i]) for i in part) for part in parts] for x in (mu, pi))
    if distance is tv:
        return sum(abs(a - b) for a, b in zip(m, p)) / 2
    if distance is kl:
        return sum(a * math.log(a / b) for a, b in zip(m, p) if a > 0)
    return abs(p[0] / m[0] - 1)


@pytest.mark.parametrize("K", [0, 1, 5, 20])
@pytest.mark.parametrize("distance", [tv, kl, ratio])
def test_distances_match_a_float64_brute_force_over_the_vocabulary(distance, K):
    mu64, pi64 = laws(K, 200, 50, spread=2.0, dtype=torch.float64)
    y = torch.multinomial(mu64, 1)[:, 0]
    m, p, y_ids = listed(mu64.float(), pi64.float(), y, K)
    D = distance(m, p)
    for i in range(len(y)):
        named = [*dict.fromkeys(y_ids[i].tolist())]
        want = brute_force(mu64[i], pi64[i], named, distance)
        smallest = min(1 - sum(mu64[i, named]), 1 - sum(pi64[i, named]))
        if smallest > 1e-6:
            assert math.isclose(D[i], want, abs_tol=1e-5, rel_tol=1e-5)


@pytest.mark.parametrize("distance", [tv, kl])
def test_k_equal_to_the_vocabulary_is_the_exact_divergence(distance):
    mu, pi = laws(1, 100, 30)
    m, p, _ = listed(mu, pi, torch.multinomial(mu, 1)[:, 0], 30)
    exact = (mu - pi).abs().sum(-1) / 2 if distance is tv else (mu * (mu / pi).log()).sum(-1)
    assert torch.allclose(distance(m, p), exact, atol=1e-5)


@pytest.mark.parametrize("distance", [tv, kl])
def test_binary_is_below_top_k_is_below_the_full_divergence(distance):
    mu, pi = laws(2, 300, 40, spread=1.5)
    y = torch.multinomial(mu, 1)[:, 0]
    D = [distance(*listed(mu, pi, y, K)[:2]) for K in (0, 1, 2, 5, 10, 20, 39, 40)]
    for coarse, fine in zip(D, D[1:]):
        assert (coarse <= fine + 1e-5).all()
    assert (D[0] < D[3] - 1e-3).any() and (D[3] < D[-1] - 1e-3).any()  # and not by accident


finite_or_absent = st.one_of(st.floats(-200, 0), st.just(-math.inf), st.floats(-1e30, 200))


@settings(max_examples=300)
@example([(-87.0, 2.0)])  # a quotient that overflows float32
@example([(-math.inf, -math.inf)])
@given(st.lists(st.tuples(finite_or_absent, finite_or_absent), min_size=1, max_size=6))
def test_nothing_non_finite_or_negative_out_of_any_log_probabilities(pairs):
    mu, pi = torch.tensor(pairs, dtype=torch.float32).T.exp()
    for distance in (tv, kl, ratio):
        D = distance(mu[None], pi[None])
        assert D.isfinite().all()
        if mu.sum() < 1 and pi.sum() < 1:  # else they are no laws, and KL may be negative
            assert (D > -1e-6).all()


def test_top_k_mass_that_rounds_above_one_is_harmless():
    mu = torch.tensor([[0.6, 0.4000002]])
    assert kl(mu, mu).item() == 0.0 and tv(mu, mu).item() == 0.0


def test_a_nan_stays_a_nan_so_that_the_run_can_stop():
    for distance in (tv, kl, ratio):
        assert distance(torch.tensor([[math.nan]]), torch.tensor([[0.5]])).isnan().all()


# --------------------------------------------------------------------------------------- masks

PAPER = {  # name: distance, radius for A<0, for A>0, K, anchor, floors, blocks at D == delta
    "dppo-binary-tv": (tv, 0.15, 0.15, 0, "rollout", (0, 0), False),
    "dppo-binary-kl": (kl, 0.05, 0.05, 0, "rollout", (0, 0), False),
    "dppo-topk-tv": (tv, 0.15, 0.15, 20, "rollout", (0, 0), False),
    "dppo-topk-kl": (kl, 0.05, 0.05, 20, "rollout", (0, 0), False),
    "dppo-binary-tv-recompute": (tv, 0.15, 0.15, 0, "recomputed", (0, 0), False),
    "dppo-binary-kl-recompute": (kl, 0.05, 0.05, 0, "recomputed", (0, 0), False),
    "grpo": (ratio, 0.2, 0.28, 0, "rollout", (0, 0), False),
    "minirl": (ratio, 0.2, 0.28, 0, "recomputed", (0, 0), False),
    "minirl-tis": (ratio, 0.2, 0.28, 0, "recomputed", (0, 0), False),
    "pg-is": (None, math.inf, math.inf, 0, "rollout", (0, 0), False),
    "cispo": (None, math.inf, math.inf, 0, "rollout", (0, 0), False),
    "mask-0.5": (tv, 0.5, math.inf, 0, "rollout", (0, 0), True),
    "mask-0.8": (tv, 0.8, math.inf, 0, "rollout", (0, 0), True),
    "mask-0.5-recompute": (tv, 0.5, math.inf, 0, "recomputed", (0, 0), True),
    "grpo-relax-low": (ratio, 0.2, 0.28, 0, "rollout", (0.1, 0), False),
    "grpo-relax-high": (ratio, 0.2, 0.28, 0, "rollout", (0, 0.1), False),
    "grpo-relax-both": (ratio, 0.2, 0.28, 0, "rollout", (0.1, 0.1), False),
}
CAPPED = {"minirl-tis", "cispo"}


def test_the_table_has_every_row_of_the_paper_and_no_other():
    assert METHODS.keys() == PAPER.keys()
    for name, row in METHODS.items():
        _, _, _, K, anchor, _, _ = PAPER[name]
        assert (row.top_k, row.anchor) == (K, anchor)
        assert (row.cap < 1e6) == (name in CAPPED)
        assert math.isclose(row.cap, 10.0 if name in CAPPED else math.exp(20))


def slow_keep(name, A, mu, pi, outcomes):
    """The rule written once more, with branches, on Python floats."""
    distance, low, high, _, _, floors, at_equality = PAPER[name]
    if A == 0 or distance is None:
        return True
    delta, floor = (high, floors[1]) if A > 0 else (low, floors[0])
    toward = (A > 0 and pi <= mu) or (A < 0 and pi >= mu)
    D = distance(*outcomes).item()
    inside = D < delta or (D == delta and not at_equality)
    return toward or inside or mu < floor


@pytest.mark.parametrize("name", METHODS)
def test_mask_of_every_row_against_a_slow_loop(name):
    K = METHODS[name].top_k
    mu_full, pi_full = laws(3, 1500, 30, spread=2.5, move=2.0)
    mu, pi, _ = listed(mu_full, pi_full, torch.multinomial(mu_full, 1)[:, 0], K)
    A = torch.tensor([1.0, -1.0, 0.0, 0.3, -1e-3] * 300)
    keep = keep_mask(A, mu, pi, METHODS[name])
    want = [
        slow_keep(name, *x, (mu[i], pi[i]))
        for i, x in enumerate(zip(A.tolist(), mu[:, 0].tolist(), pi[:, 0].tolist()))
    ]
    assert keep.tolist() == want
    if PAPER[name][0] is not None and name not in ("mask-0.8",):
        assert 0 < keep.float().mean() < 1  # the sample has blocked and kept tokens


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("A", [1.0, -1.0])
def test_moving_toward_the_anchor_is_never_blocked(name, A):
    anchor = torch.tensor([[0.5]] * 3)
    pi = torch.tensor([[1e-6], [0.4999], [0.5]]) if A > 0 else torch.tensor([[1.0], [0.51], [0.5]])
    assert keep_mask(torch.full((3,), A), anchor, pi, METHODS[name]).all()


def test_comparison_is_strict_but_for_the_minimal_masks():
    # 0.75 - 0.25 = 0.5 exactly, with the pooled mass as well
    mu, pi, A = torch.tensor([[0.75]]), torch.tensor([[0.25]]), torch.tensor([-1.0])
    assert keep_mask(A, mu, pi, Method(tv, (0.5, 0.5))).item()
    assert not keep_mask(A, mu, pi, METHODS["mask-0.5"]).item()
    assert keep_mask(-A, pi, mu, METHODS["mask-0.5"]).item()  # A > 0 is never blocked there


def test_dppo_frees_the_rare_token_that_the_clip_blocks_and_blocks_the_dominant_one():
    mu, pi = torch.tensor([[1e-4], [0.99]]), torch.tensor([[1e-2], [0.80]])
    A = torch.tensor([1.0, -1.0])  # both moves lead away
    assert keep_mask(A, mu, pi, METHODS["grpo"]).tolist() == [False, True]
    assert keep_mask(A, mu, pi, METHODS["dppo-binary-tv"]).tolist() == [True, False]


def test_relaxed_clip_frees_rare_tokens_on_its_side_only():
    anchor, pi = torch.tensor([[0.05], [0.05]]), torch.tensor([[0.10], [0.01]])
    A = torch.tensor([1.0, -1.0])
    want = {"grpo": [0, 0], "grpo-relax-low": [0, 1], "grpo-relax-high": [1, 0]}
    for name, keep in (want | {"grpo-relax-both": [1, 1]}).items():
        assert keep_mask(A, anchor, pi, METHODS[name]).int().tolist() == keep


# ---------------------------------------------------------------------------------------- loss


def gradient(f, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x).sum(), x)[0]


def test_grpo_row_has_the_gradient_of_the_clipped_objective():
    g = torch.Generator().manual_seed(0)
    logmu = -3 * torch.rand(2000, generator=g, dtype=torch.float64) - 0.5
    logpi = logmu + 0.4 * torch.randn(2000, generator=g, dtype=torch.float64)
    A = torch.randn(2000, generator=g, dtype=torch.float64)

    def clipped(logpi):
        r = (logpi - logmu).exp()
        return -torch.minimum(r * A, r.clamp(1 - 0.2, 1 + 0.28) * A)

    keep = keep_mask(A, logmu.exp()[:, None], logpi.exp()[:, None], METHODS["grpo"])
    ours = gradient(lambda x: policy_loss(x, logmu, A, keep, METHODS["grpo"].cap), logpi)
    assert torch.allclose(ours, gradient(clipped, logpi), atol=1e-12)
    assert 0.05 < (~keep).double().mean() < 0.9


def test_cap_scales_the_gradient_and_does_not_remove_it():
    A, keep = torch.tensor([2.0]), torch.tensor([True])
    at = lambda r, cap: gradient(
        lambda x: policy_loss(x, torch.zeros(1), A, keep, cap), torch.tensor([math.log(r)])
    ).item()
    assert math.isclose(at(100.0, 5.0), -5 * 2, rel_tol=1e-6)
    assert math.isclose(at(3.0, 5.0), -3 * 2, rel_tol=1e-6)  # the gradient of -r A
    assert math.isclose(at(100.0, math.exp(20)), -100 * 2, rel_tol=1e-6)


def test_a_huge_ratio_leaves_loss_and_gradient_finite():
    logpi, logmu = torch.tensor([0.0, -1.0]), torch.tensor([-200.0, -1.0])
    keep = torch.tensor([False, True])
    loss = lambda x: policy_loss(x, logmu, torch.ones(2), keep, math.exp(20))
    assert gradient(loss, logpi).tolist() == [0.0, -1.0] and loss(logpi).isfinite().all()


def test_mask_and_weight_are_constants_to_the_gradient():
    logpi, logmu, A = torch.tensor([-1.0]), torch.tensor([-2.0]), torch.tensor([1.0])
    g = gradient(lambda x: policy_loss(x, logmu, A, torch.tensor([True]), 1e9), logpi)
    assert math.isclose(g.item(), -math.e, rel_tol=1e-6)  # -r A, and no -r A log pi besides


# ------------------------------------------------------------------------- the head, in chunks


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("chunk", [7, 1000])
def test_head_loss_equals_autograd_on_full_logits(name, chunk):
    g = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    method, T, N, V, H = METHODS[name], 0.7, 40, 31, 8
    hidden, weight, A = rand(N, H), rand(V, H), rand(N)
    mu_full = ((hidden + 0.5 * rand(N, H)) @ weight.T / T).softmax(-1)
    y = torch.multinomial(mu_full, 1, generator=g)
    top = mu_full.log().topk(method.top_k)
    y_ids, logmu = dppo.slots(y, mu_full.log().gather(-1, y), top.indices, top.values)
    kept = []

    def token_loss(logpi, rows):
        pi = logpi.detach().masked_fill(logmu[rows] == -math.inf, -math.inf).exp()
        keep = keep_mask(A[rows], logmu[rows].exp(), pi, method)
        kept.append(keep)
        return policy_loss(logpi[:, 0], logmu[rows, 0], A[rows], keep, method.cap)

    def full(hidden, weight):
        logp = (hidden @ weight.T / T).log_softmax(-1).gather(-1, y_ids)
        return token_loss(logp, slice(None)).sum()

    def chunked(hidden, weight):
        return dppo.HeadLoss.apply(hidden, weight, y_ids, T, chunk, token_loss)

    values, grads = [], []
    for loss in (full, chunked):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        value = 3.0 * loss(*leaves)  # a factor after the head reaches the gradient too
        values.append(value.item())
        grads.append(torch.autograd.grad(value, leaves))
    # the head computes log-probabilities in float32, whatever comes in
    assert math.isclose(*values, rel_tol=1e-5, abs_tol=1e-5)
    for a, b in zip(*grads):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    if name not in ("pg-is", "cispo", "mask-0.8", "mask-0.5", "mask-0.5-recompute"):
        assert 0 < torch.cat(kept).double().mean() < 1


def test_the_algorithm_stands_alone():
    """What stands between the rules runs with the imports that README.md names and no others."""
    source = Path(dppo.__file__).read_text()
    block = source[source.index("# === ALGORITHM") : source.index("# === end of ALGORITHM")]
    names = dict(math=math, torch=torch, Callable=Callable, dataclass=dataclass, __name__="dppo")
    exec(block, names)
    assert {*names["METHODS"]} == {*METHODS}
    A, mu, pi = (
        torch.tensor([1.0, -1.0]),
        torch.tensor([[0.5], [0.5]]),
        torch.tensor([[0.7], [0.3]]),
    )
    assert not names["keep_mask"](A, mu, pi, names["METHODS"]["dppo-binary-tv"]).any()
    logpi = pi[:, 0].log().requires_grad_()
    names["policy_loss"](
        logpi, mu[:, 0].log(), A, torch.tensor([True, False]), 10.0
    ).sum().backward()
    assert torch.allclose(logpi.grad, torch.tensor([-1.4, 0.0]))
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    y = torch.tensor([[0], [3], [5]])
    names["HeadLoss"].apply(hidden, weight, y, 1.0, 2, lambda logp, rows: -logp[:, 0]).backward()
    assert hidden.grad.norm() > 0
