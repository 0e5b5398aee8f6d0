"""Rollout and trainer agree on the log-probability of each sampled token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_trainers import Models
from ed_trainers.losses.policy import Truncation
from ed_trainers.methods.grpo import policies
from ed_trainers.online.phase import compute_policy
from ed_trainers.rollout import Weights
from online_runs import ToyRollout, filtered, online, phase_of

SAMPLINGS = [
    {"temperature": 0.7},
    {"temperature": 0.5},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.7, "min_p": 0.2},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
]


@pytest.fixture
def sharp(toy):
    """A toy model whose distributions are far from uniform."""
    model = toy.model()
    model.kernel[...] = model.kernel[...] * 30
    return model


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.daily("{'temperature': 0.7}", "{'temperature': 0.7, 'top_p': 0.8}")
def test_importance_ratios_are_one_where_rollout_and_trainer_are_one_model(
    sharp, tmp_path, sampling
):
    run = online("grpo", sharp, tmp_path, beta=0.0, **sampling)
    generation = phase_of(run).generate(run.feed.dataset.batch_at(0), run.weights(), 0)
    assert generation.figures["sampling/sampling_logp_difference/max"] < 1e-4
    np.testing.assert_allclose(generation.rows["correction"], 1, atol=1e-4)


class OffPolicy(ToyRollout):
    """Samples by other weights than the learner's, as an engine with rounded weights does."""

    def __init__(self, model):
        super().__init__()
        self.weights = Weights(*model.split_module(), version=0)

    def generate(self, prompts, params, weights, *, seeds=None):
        return super().generate(prompts, params, self.weights, seeds=seeds)


@pytest.mark.daily("0.5")
@pytest.mark.parametrize("temperature", [0.5, 0.7])
def test_the_correction_is_the_ratio_at_the_temperature_of_the_sampling(
    sharp, toy, tmp_path, temperature
):
    other = toy.model()
    other.kernel[...] = sharp.kernel[...] * 1.05
    run = online(
        "grpo", sharp, tmp_path, beta=0.0, temperature=temperature, importance_sampling_cap=100
    )
    run.method.rollout = OffPolicy(other)
    rows = phase_of(run).generate(run.feed.dataset.batch_at(0), run.weights(), 0).rows
    batch = run.prepare({name: jnp.asarray(array) for name, array in rows.items()})
    learner, sampler = (
        compute_policy(run.method, model, batch)[1].logps for model in (sharp, other)
    )
    expected = np.where(rows["weights"] > 0, np.exp(learner - sampler), 1)
    assert np.abs(expected - 1).max() > 0.05, "or nothing is corrected"
    np.testing.assert_allclose(rows["correction"], expected, rtol=1e-4)


def test_the_probability_that_the_filters_leave_is_exact():
    random = np.random.default_rng(0)
    scores = random.normal(size=(50, 40)) * 3
    logps = np.asarray(jax.nn.log_softmax(jnp.asarray(scores, jnp.float32)))
    for sampling in SAMPLINGS[2:]:
        given = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **sampling}
        truncation = Truncation(given["top_k"], given["top_p"], given["min_p"])
        assert truncation.active
        kept = np.stack([filtered(row, given) > 0 for row in scores])
        exact = np.log(np.where(kept, np.exp(logps.astype(np.float64)), 0).sum(-1))
        np.testing.assert_allclose(truncation.log_mass(jnp.asarray(logps)), exact, atol=1e-5)
    assert not Truncation(0, 1.0, 0.0).active


@pytest.mark.nightly
@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[-1]], ids=str)
def test_the_comparison_takes_one_forward_pass_of_the_learner(sharp, toy, tmp_path, sampling):
    run = online("grpo", sharp, tmp_path, beta=0.0, **sampling)
    passes = []

    class Counted(toy.Model):
        def __call__(self, *inputs, **more):
            passes.append(1)
            return super().__call__(*inputs, **more)

    rows = phase_of(run).generate(run.feed.dataset.batch_at(0), run.weights(), 0).rows
    names = ("input_ids", "segment_ids", "position_ids", "targets")
    batch = run.prepare({name: jnp.asarray(rows[name]) for name in names})
    policies(run.method, Models(Counted(toy.Config())), batch)
    assert len(passes) == 1
