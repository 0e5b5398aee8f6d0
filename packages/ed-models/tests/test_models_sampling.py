"""Drawing tokens: filters against plain definitions, and draws that depend on nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_models.sampling import Sampling, first_argmax, in_nucleus, next_token

LOGITS = jnp.asarray(np.random.default_rng(0).standard_normal((3, 50)) * 2, jnp.float32)


def draws(settings, n=400, logits=LOGITS, **more):
    """[n, b] tokens, drawn at n positions."""

    @jax.jit
    def at(position):
        b = logits.shape[0]
        return next_token(
            logits,
            settings,
            seeds=jnp.arange(b),
            positions=jnp.full((b,), position),
            **more,
        )

    return np.asarray(jax.vmap(at)(jnp.arange(n)))


def test_greedy_takes_the_first_of_equals():
    x = jnp.asarray([[0.0, 3.0, 3.0], [5.0, 5.0, 5.0], [-1.0, -2.0, 0.0]])
    assert first_argmax(x).tolist() == [1, 0, 2]
    assert (
        next_token(LOGITS, Sampling(), seeds=None, positions=None).tolist()
        == np.argmax(LOGITS, axis=1).tolist()
    )


def test_not_a_number_still_gives_a_token_of_the_vocabulary():
    assert 0 <= int(first_argmax(jnp.full((1, 4), jnp.nan))[0]) < 4


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.5, 0.9, 0.999])
def test_nucleus_is_the_fewest_likeliest_that_reach_top_p(top_p):
    probs = np.asarray(jax.nn.softmax(LOGITS))
    got = np.asarray(in_nucleus(jnp.asarray(probs), top_p))
    for row, kept in zip(probs, got, strict=True):
        order = np.argsort(-row)
        before = np.cumsum(row[order]) - row[order]
        assert set(np.flatnonzero(kept)) == set(order[before < top_p])


def test_draws_follow_the_distribution():
    got = draws(Sampling(do_sample=True, temperature=0.7), n=4000)
    want = np.asarray(jax.nn.softmax(LOGITS / 0.7))
    for row in range(3):
        share = np.bincount(got[:, row], minlength=50) / len(got)
        assert np.abs(share - want[row]).max() < 0.03  # five standard deviations


@pytest.mark.parametrize(
    "settings",
    [
        Sampling(do_sample=True, top_k=3),
        Sampling(do_sample=True, top_p=0.6),
        Sampling(do_sample=True, min_p=0.4),
        Sampling(do_sample=True, temperature=2.0, top_k=10, top_p=0.5, min_p=0.05),
    ],
)
def test_filters_admit_what_hugging_faces_admit(settings):
    got = draws(settings)
    for row in range(3):
        assert set(got[:, row].tolist()) == admitted(np.asarray(LOGITS[row]), settings)


def admitted(logits, s):
    """The tokens left by temperature, top-k, top-p and min-p, in this order."""
    logits = logits / s.temperature
    alive = np.ones(len(logits), bool)
    if s.top_k:
        alive &= logits >= np.sort(logits)[-s.top_k]

    def probs():
        p = np.where(alive, np.exp(logits - logits.max()), 0)
        return p / p.sum()

    p = probs()
    order = np.argsort(-p)
    alive[order] &= np.cumsum(p[order]) - p[order] < s.top_p
    p = probs()
    return set(np.flatnonzero(alive & (p >= s.min_p * p.max())).tolist())


def test_a_draw_depends_on_seed_and_position_only():
    settings = Sampling(do_sample=True)
    seeds, positions = jnp.asarray([7, 8, 7]), jnp.asarray([3, 3, 4])
    whole = next_token(LOGITS, settings, seeds=seeds, positions=positions)
    for row in range(3):
        alone = next_token(
            LOGITS[row : row + 1], settings, seeds=seeds[row][None], positions=positions[row][None]
        )
        assert alone[0] == whole[row]
    assert len(set(draws(settings)[:, 0].tolist())) > 5


def test_repetition_penalty_is_hugging_faces():
    seen = jnp.zeros((1, 3), bool).at[0, :2].set(True)

    def best(logits, factor):
        settings = Sampling(repetition_penalty=factor)
        return int(
            next_token(jnp.asarray([logits]), settings, seeds=None, positions=None, seen=seen)[0]
        )

    assert best([2.0, 1.0, 1.5], 1.2) == 0  # 2 / 1.2 = 1.67
    assert best([2.0, 1.0, 1.5], 1.4) == 2  # 2 / 1.4 = 1.43
    assert best([-1.0, -9.0, -1.3], 1.2) == 0  # -1 * 1.2
    assert best([-1.0, -9.0, -1.3], 1.4) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
    ],
)
def test_values_out_of_range_are_named(name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be"):
        Sampling(**{name: value})
