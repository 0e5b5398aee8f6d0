"""Drawing tokens: filters against plain definitions, and draws that depend on nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_models.generation.processors import GeneratedRows
from ed_models.generation.sampling import (
    first_argmax,
    in_nucleus,
    likely_enough,
    penalize_repetition,
    row_keys,
)
from ed_models.generation.token_choice import TokenChoice, next_token

LOGITS = jnp.asarray(np.random.default_rng(0).standard_normal((3, 50)) * 2, jnp.float32)


def holding(ids):
    """Rows of these tokens, none of them new."""
    return GeneratedRows(ids, jnp.zeros(len(ids), int), 10, jnp.asarray([-1]))


def draws(settings, n=400, logits=LOGITS, **more):
    """[n, b] tokens, drawn at n positions."""

    @jax.jit
    def at(position):
        b = logits.shape[0]
        return next_token(
            logits,
            settings,
            keys=row_keys(0, b),
            positions=jnp.full((b,), position),
            **more,
        )

    return np.asarray(jax.vmap(at)(jnp.arange(n)))


def test_greedy_takes_the_first_of_equals():
    x = jnp.asarray([[0.0, 3.0, 3.0], [5.0, 5.0, 5.0], [-1.0, -2.0, 0.0]])
    assert first_argmax(x).tolist() == [1, 0, 2]
    assert next_token(LOGITS, TokenChoice()).tolist() == np.argmax(LOGITS, axis=1).tolist()


@pytest.mark.parametrize("v", [16384, 16385])
def test_a_large_vocabulary_has_the_same_first_of_equals(v):
    x = np.random.default_rng(0).normal(size=(5, v)).astype(np.float32)
    x[1, [130, 700, v - 1]] = 9  # in separate blocks
    x[2, [900, 901]] = 9
    x[3] = -np.inf
    x[4, 77] = np.nan
    *found, with_nan = first_argmax(jnp.asarray(x)).tolist()
    assert found == np.argmax(x[:4], axis=1).tolist()
    assert 0 <= with_nan < v


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


def test_draws_follow_softmax_distribution():
    got = draws(TokenChoice(do_sample=True, temperature=0.7), n=4000)
    want = np.asarray(jax.nn.softmax(LOGITS / 0.7))
    for row in range(3):
        share = np.bincount(got[:, row], minlength=50) / len(got)
        assert np.abs(share - want[row]).max() < 0.03  # five standard deviations


@pytest.mark.parametrize(
    "settings",
    [
        TokenChoice(do_sample=True, top_k=3),
        TokenChoice(do_sample=True, top_p=0.6),
        TokenChoice(do_sample=True, min_p=0.4),
        TokenChoice(do_sample=True, temperature=2.0, top_k=10, top_p=0.5, min_p=0.05),
    ],
)
def test_sampling_filters_admit_same_tokens_as_transformers(settings):
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
    alive[order] &= np.cumsum(p[order]) - p[order] < (s.top_p or 1)
    p = probs()
    return set(np.flatnonzero(alive & (p >= (s.min_p or 0) * p.max())).tolist())


@pytest.mark.nightly
def test_a_draw_depends_on_key_and_position_only():
    settings = TokenChoice(do_sample=True)
    keys, positions = row_keys(7, 2)[jnp.asarray([0, 1, 0])], jnp.asarray([3, 3, 4])
    whole = next_token(LOGITS, settings, keys=keys, positions=positions)
    for row in range(3):
        alone = next_token(
            LOGITS[row : row + 1], settings, keys=keys[row][None], positions=positions[row][None]
        )
        assert alone[0] == whole[row]
    assert len(set(draws(settings)[:, 0].tolist())) > 5


def test_repetition_penalty_is_hugging_faces():
    rows = holding(jnp.asarray([[-1, 0, 1]]))

    def best(logits, factor):
        settings = TokenChoice(repetition_penalty=factor)
        return int(next_token(jnp.asarray([logits]), settings, rows=rows)[0])

    assert best([2.0, 1.0, 1.5], 1.2) == 0  # 2 / 1.2 = 1.67
    assert best([2.0, 1.0, 1.5], 1.4) == 2  # 2 / 1.4 = 1.43
    assert best([-1.0, -9.0, -1.3], 1.2) == 0  # -1 * 1.2
    assert best([-1.0, -9.0, -1.3], 1.4) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", 2.5),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
    ],
)
def test_values_out_of_range_are_named(name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value!r}; it must be"):
        TokenChoice(**{name: value})


def test_row_keys_differ_between_seeds_and_rows():
    keys = [set(map(tuple, np.asarray(jax.random.key_data(row_keys(s, 8))))) for s in range(4)]
    assert len(set.union(*keys)) == 4 * 8
    # The key of a row does not depend on how many there are.
    np.testing.assert_array_equal(
        jax.random.key_data(row_keys(3, 8))[:2], jax.random.key_data(row_keys(3, 2))
    )


def test_only_the_structure_is_static():
    def structure(**options):
        return jax.tree.structure(TokenChoice(do_sample=True, **options))

    assert structure(temperature=0.3) == structure(temperature=2)
    assert structure(top_p=0.9, min_p=0.1) == structure(top_p=0.5, min_p=0.2)
    assert structure(top_k=3) != structure(top_k=4)
    assert len({structure(), structure(top_p=0.9), structure(repetition_penalty=1.1)}) == 3
    assert structure(top_p=1.0, min_p=0, repetition_penalty=1) == structure()
    # Where nothing is drawn, what drawing would do makes no difference.
    assert TokenChoice(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1) == TokenChoice()


@pytest.mark.nightly
def test_traced_numbers_choose_as_constants_do():
    choice = TokenChoice(
        do_sample=True, temperature=0.7, top_k=20, top_p=0.8, min_p=0.1, repetition_penalty=1.3
    )
    more = {"keys": row_keys(1, 3), "positions": jnp.arange(3)}
    more["rows"] = holding(jnp.argsort(LOGITS)[:, -8:])
    traced = jax.jit(lambda choice: next_token(LOGITS, choice, **more))(choice)
    assert traced.tolist() == next_token(LOGITS, choice, **more).tolist()


@pytest.mark.nightly
def test_rows_may_have_numbers_of_their_own():
    numbers = jnp.asarray([[0.2], [0.5], [0.9]])
    probs = jax.nn.softmax(LOGITS)
    for function, values, seen in (
        (in_nucleus, probs, ()),
        (likely_enough, LOGITS, ()),
        (penalize_repetition, LOGITS, (LOGITS > 0,)),
    ):
        got = function(values, *seen, numbers)
        for row in range(3):
            alone = function(
                values[row][None], *(x[row][None] for x in seen), float(numbers[row, 0])
            )
            np.testing.assert_array_equal(got[row], alone[0])
