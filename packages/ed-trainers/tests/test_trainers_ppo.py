"""PPO: advantages and clipped losses equal their definitions in float64; the value head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_trainers.losses.ppo import (
    generalized_advantages,
    last_of_answers,
    policy_losses,
    value_losses,
    whiten_values,
)

# Two answers in the first row, of three tokens and of one; one answer in the second.
WEIGHTS = np.array([[0, 1, 1, 1, 0, 0, 1, 0], [0, 0, 1, 1, 1, 1, 0, 0]], np.float64)


def numbers(seed):
    return np.random.default_rng(seed).normal(size=WEIGHTS.shape)


def answers():
    """Row and positions of each answer."""
    return [(0, [1, 2, 3]), (0, [6]), (1, [2, 3, 4, 5])]


@pytest.mark.parametrize(("gamma", "lam"), [(0.9, 0.7), (1.0, 0.95), (1.0, 0.0), (1.0, 1.0)])
def test_advantages_are_sums_over_the_rest_of_each_answer(gamma, lam):
    rewards, values = numbers(0), numbers(1)
    wanted = np.zeros_like(rewards)
    for row, places in answers():
        for i, place in enumerate(places):
            for k, later in enumerate(places[i:]):
                behind = values[row, later + 1] if later != places[-1] else 0.0
                difference = rewards[row, later] + gamma * behind - values[row, later]
                wanted[row, place] += (gamma * lam) ** k * difference
    made = generalized_advantages(
        *(jnp.asarray(x, jnp.float32) for x in (rewards, values, WEIGHTS)), gamma=gamma, lam=lam
    )
    np.testing.assert_allclose(made, wanted, atol=1e-6)


def test_the_last_token_of_each_answer():
    wanted = np.zeros_like(WEIGHTS)
    for row, places in answers():
        wanted[row, places[-1]] = 1
    np.testing.assert_array_equal(last_of_answers(jnp.asarray(WEIGHTS)), wanted)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_normalizes_weighted_values(shift_mean):
    values, here = 3 * numbers(2) + 1, WEIGHTS > 0
    own = values[here]
    wanted = np.zeros_like(values)
    wanted[here] = (own - own.mean()) / np.sqrt(own.var(ddof=1) + 1e-8)
    wanted[here] += 0 if shift_mean else own.mean()
    made = whiten_values(jnp.asarray(values), jnp.asarray(WEIGHTS), shift_mean=shift_mean)
    np.testing.assert_allclose(made, wanted, atol=1e-5)


def test_clipping_never_makes_a_loss_smaller():
    ratios, advantages = np.exp(0.5 * numbers(3)), numbers(4)
    made = policy_losses(jnp.asarray(ratios), jnp.asarray(advantages), cliprange=0.2)
    wanted = np.maximum(-advantages * ratios, -advantages * np.clip(ratios, 0.8, 1.2))
    np.testing.assert_allclose(made.losses, wanted, rtol=1e-6)
    # Where the ratio has gone further than the clip in the direction of the advantage.
    outside = ((ratios > 1.2) & (advantages > 0)) | ((ratios < 0.8) & (advantages < 0))
    np.testing.assert_array_equal(made.clipped, outside)
    slope = jax.grad(lambda r: policy_losses(r, advantages, cliprange=0.2).losses.sum())(
        jnp.asarray(ratios)
    )
    assert np.all((np.asarray(slope) == 0) == outside) and outside.any() and not outside.all()


def test_value_loss_clips_to_old_values():
    values, old, returns = numbers(5), numbers(6), numbers(7)
    made = value_losses(*(jnp.asarray(x) for x in (values, old, returns)), cliprange=0.2)
    held = np.clip(values, old - 0.2, old + 0.2)
    wanted = 0.5 * np.maximum((values - returns) ** 2, (held - returns) ** 2)
    np.testing.assert_allclose(made.losses, wanted, rtol=1e-5)
    np.testing.assert_array_equal(made.clipped, (held - returns) ** 2 > (values - returns) ** 2)
