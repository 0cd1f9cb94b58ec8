"""The program `python -m toy`, and what a mask on sampled tokens does and does not bound."""

import sys
import time
from itertools import product

import numpy as np
import pytest
import torch

import dppo
from toy import __main__ as toy
from toy import mdp as m

TV = dppo.METHODS["dppo-binary-tv"]
CLIP = dppo.METHODS["grpo"]
DELTA = TV.delta[0]


# The program


def test_table_holds_and_shows_every_statement(capsys):
    table = toy.run(instances=12, horizons=(2,))
    toy.show(table)
    shown = capsys.readouterr().out
    assert all(name in shown for name in table) and len(table) == 18
    assert not any(row["failures"] for row in table.values())
    assert table["sharp bound, D_max"]["tight"]["T = 2"] > 0.999


def test_program_fails_when_a_statement_does(monkeypatch, capsys):
    half = m.penalty_7
    monkeypatch.setattr(m, "penalty_7", lambda *args: half(*args) / 2)
    assert toy.main(["--instances", "4"]) == 1
    assert " no\n" in capsys.readouterr().out


def test_plot_without_matplotlib_is_one_clear_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert toy.main(["--plot", str(tmp_path / "x.png")]) == 2
    assert capsys.readouterr().err == "--plot needs matplotlib: pip install matplotlib\n"


def test_plot_writes_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    assert toy.main(["--plot", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_fifty_states_and_fifty_steps_take_a_blink():
    started = time.process_time()
    ((error, _, tolerance),) = toy.large_statement(np.random.default_rng(0)).values()
    assert error <= tolerance and time.process_time() - started < 5


# PPO's clip is the mask with D = |r - 1|


def test_ratio_distance_gives_the_gradient_of_the_clipped_objective():
    """theory.md#ppo-case"""
    torch.manual_seed(0)
    logmu = torch.log(torch.rand(400, dtype=torch.float64))
    logpi = (logmu + torch.randn(400) * 0.5).clamp(max=0).requires_grad_()
    A = torch.randn(400, dtype=torch.float64)
    A[::7] = 0
    r = (logpi - logmu).exp()
    low, high = 0.2, 0.28
    clipped = torch.minimum(r * A, r.clamp(1 - low, 1 + high) * A)
    (expected,) = torch.autograd.grad(-clipped.sum(), logpi)
    keep = dppo.keep_mask(A, logmu.exp()[:, None], logpi.detach().exp()[:, None], CLIP)
    loss = dppo.policy_loss(logpi, logmu, A, keep, CLIP.cap)
    (found,) = torch.autograd.grad(loss.sum(), logpi)
    assert 0.1 < (~keep).double().mean() < 0.5
    assert torch.allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("method", [TV, dppo.METHODS["dppo-binary-kl"], CLIP])
def test_only_a_step_away_from_the_anchor_is_blocked(method):
    mu, pi = torch.tensor([[0.5]]), torch.tensor([[0.1], [0.9]])  # r < 1, r > 1; both far
    for A, keep in [(1.0, [True, False]), (-1.0, [False, True]), (0.0, [True, True])]:
        advantages = torch.full((2,), A)
        assert dppo.keep_mask(advantages, mu.expand(2, 1), pi, method).tolist() == keep


# What a mask does: exact softmax gradients, with the true TV as the distance


def slots(law, y):
    """(..., V) laws and tokens y (...) -> (..., V) with y first: K = V, so tv is exact."""
    V = law.shape[-1]
    order = torch.tensor([[a, *(b for b in range(V) if b != a)] for a in range(V)])
    return law.gather(-1, order[y])


def step(logits, mu, state, y, A, p, method, lr):
    """One exact step of ascent on sum p M r A; -> (keep, each state's span of the step)."""
    logpi = logits.log_softmax(-1)
    anchor, pi = (slots(law[state], y) for law in (mu, logpi.detach().exp()))
    keep = dppo.keep_mask(A, anchor, pi, method)
    loss = dppo.policy_loss(logpi[state, y], mu[state, y].log(), A, keep, method.cap)
    (gradient,) = torch.autograd.grad((p * loss).sum(), logits)
    logits.data -= lr * gradient
    return keep, lr * (gradient.amax(-1) - gradient.amin(-1))


def tv(mu, logits):
    return (logits.detach().softmax(-1) - mu).abs().sum(-1) / 2


VOCAB, T = 4, 2
ALL_Y = torch.tensor(list(product(range(VOCAB), repeat=T)))  # (16, T)
PREFIX = torch.stack([ALL_Y[:, 0] * 0, 1 + ALL_Y[:, 0]], 1)  # (16, T): the root, then y_1's child


def train(seed, method, steps, lr):
    """A random mu and 0/1 reward on the tree -> TV to mu and span of the step, (steps, 5) each."""
    g = torch.Generator().manual_seed(seed)
    mu = torch.randn(1 + VOCAB, VOCAB, generator=g, dtype=torch.float64).softmax(-1)
    R = torch.rand(len(ALL_Y), generator=g, dtype=torch.float64).round()
    p = mu[PREFIX, ALL_Y].prod(-1)  # (16,)
    A = (R - p @ R)[:, None].expand(-1, T)
    logits = mu.log().requires_grad_()
    D, span = [], []
    for _ in range(steps):
        D.append(tv(mu, logits))
        span.append(step(logits, mu, PREFIX, ALL_Y, A, p[:, None], method, lr)[1])
    return torch.stack(D), torch.stack(span)


@pytest.mark.parametrize("seed", range(4))
def test_mask_with_the_true_tv_overshoots_delta_by_about_a_step(seed):
    D, span = train(seed, TV, steps=400, lr=1.0)
    inside = D[:-1] <= DELTA
    assert (~inside).any()
    # a step out of the ball: at most a quarter of its span beyond the rim (theory.md#overshoot)
    assert (D[1:] <= DELTA + span[:-1] / 4)[inside].all()
    # from there on only unblocked tokens move the state; here they stay within one such step
    overshoot = (D.max() - DELTA).item()
    assert 0 < overshoot <= span.max() / 4
    fine, _ = train(seed, TV, steps=2000, lr=0.2)
    assert 0 < fine.max() - DELTA < overshoot / 3
    free, _ = train(seed, dppo.METHODS["pg-is"], steps=400, lr=1.0)
    assert free.max() > DELTA + 4 * overshoot


def one_state(mu, pi, y, A, method, lr, steps):
    """[(TV, pi, keep)] of a single state, trained on the tokens y with advantages A."""
    mu, pi, A = (torch.tensor(x, dtype=torch.float64) for x in (mu, pi, A))
    mu, logits, y = mu[None], pi.log()[None].requires_grad_(), torch.tensor(y)
    seen = []
    for _ in range(steps):
        before = tv(mu, logits).item(), logits.detach().softmax(-1)[0]
        keep, _ = step(logits, mu, y * 0, y, A, mu[0, y], method, lr)
        seen.append((*before, keep))
    return seen


def test_an_unblocked_token_can_carry_its_state_farther_out():
    """The first token returns to its anchor and drags the second, which is blocked, along."""
    mu, pi = [0.05, 0.02, 0.93], [0.01, 0.20, 0.79]
    seen = one_state(mu, pi, [0, 1, 2], [1.0, 1.0, -1.0], TV, lr=0.1, steps=1000)
    assert seen[0][0] == pytest.approx(0.18) and seen[-1][0] > 0.26
    assert all(keep.tolist() in ([True, False, False], [False] * 3) for _, _, keep in seen)
    # with a fifth of the step it goes as far: this is no overshoot of a step
    fine = one_state(mu, pi, [0, 1, 2], [1.0, 1.0, -1.0], TV, lr=0.02, steps=4000)
    assert fine[-1][0] == pytest.approx(seen[-1][0], abs=1e-3)


def test_clip_lets_a_state_pass_tv_019_with_nothing_blocked():
    """The dominant token, 0.99 under mu, is punished; DPPO stops the same run at 0.15."""
    mu = [0.99, 0.01]
    run = one_state(mu, mu, [0], [-1.0], CLIP, lr=0.1, steps=600)
    free = [D for D, _, keep in run if keep.all()]
    assert max(free) > 0.19
    run = one_state(mu, mu, [0], [-1.0], TV, lr=0.1, steps=600)
    assert 0.15 < max(D for D, _, _ in run) < 0.16
    # the same clip stops a token of 1e-4 that has moved by 3e-5
    run = one_state([1e-4, 1 - 1e-4], [1.3e-4, 1 - 1.3e-4], [0], [1.0], CLIP, lr=0.1, steps=1)
    assert not run[0][2].any() and run[0][0] < 3.1e-5
