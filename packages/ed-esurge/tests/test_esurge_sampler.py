"""The sampler equals a numpy reference, and does not depend on the batch."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_esurge.runner.sampler import (
    adjust,
    cutoff_of_best,
    kept_of_all,
    sample,
    sample_plain,
    sample_with_mask,
)
from ed_esurge.runner.sampler_rows import SampledTokens, SamplerRows, SamplerState

VOCAB = 300  # more than the sampler's candidates


def rows(n: int, **given) -> SamplerRows:
    plain = {
        "slot": 99,
        "seed": 0,
        "position": 0,
        "top_k": 0,
        "num_logprobs": -1,
        "processed": 0,
        "temperature": 0.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
        "proposal": -1,
    }
    ints = (
        "proposal",
        "mirostat",
        "slot",
        "seed",
        "position",
        "top_k",
        "num_logprobs",
        "processed",
    )
    out = {}
    for name, default in plain.items():
        value = np.broadcast_to(np.asarray(given.get(name, default)), (n,))
        out[name] = jnp.asarray(value, jnp.int32 if name in ints else jnp.float32)
    return SamplerRows(**out)


NAMES = list(SamplerRows.__dataclass_fields__)


@partial(jax.jit, static_argnames="alternatives")
def run(logits, flat, state, alternatives):
    out, state = sample(logits, SamplerRows(*flat), state, alternatives)
    return [getattr(out, name) for name in SampledTokens.__dataclass_fields__], state


def draw(logits, given, state=None, alternatives=5):
    """Sample in one of two shapes, so that the tests compile only twice."""
    n = logits.shape[0]
    extra = (8 if n <= 8 else 4000) - n
    state = SamplerState.create(4, VOCAB) if state is None else state
    logits = jnp.pad(jnp.asarray(logits), ((0, extra), (0, 0)))
    padding = rows(extra)
    flat = [jnp.concatenate([getattr(given, k), getattr(padding, k)]) for k in NAMES]
    out, state = run(logits, flat, state, alternatives)
    return SampledTokens(*(x[:n] for x in out)), state


def random_logits(n: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, VOCAB)).astype(np.float32) * scale


def reference_support(logits, temperature, top_k, top_p, min_p) -> set[int]:
    """Return the tokens that vLLM's and Hugging Face's filters keep, computed in float64."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    order = order[: top_k or VOCAB]
    p = np.exp(scaled[order] - scaled[order].max())
    p /= p.sum()
    keep = (np.cumsum(p) - p < top_p) & (p >= min_p * p[0])
    keep[0] = True
    return set(order[keep].tolist())


def test_greedy_selects_the_first_of_equal_logits():
    logits = np.zeros((2, VOCAB), np.float32)
    logits[1, [7, 9]] = 2.0
    out, _ = draw(logits, rows(2))
    assert out.tokens.tolist() == [0, 7]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 5, 1.0, 0.0),
        (0.7, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.1),
        (1.3, 20, 0.9, 0.02),
        (8.0, 0, 0.9, 0.0),  # flat distribution: far more tokens than candidates
        (8.0, 200, 0.95, 0.0),
        (8.0, 128, 1.0, 0.0),
    ],
)
def test_sampled_tokens_stay_within_filtered_support(temperature, top_k, top_p, min_p):
    logits = random_logits(1)
    expected = reference_support(logits[0], temperature, top_k, top_p, min_p)
    n = 4000  # chi-square requires many samples
    given = rows(
        n,
        seed=np.arange(n),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    out, _ = draw(np.repeat(logits, n, axis=0), given)
    found = set(np.asarray(out.tokens).tolist())
    assert found <= expected
    p = np.exp(logits[0].astype(np.float64) / temperature)
    p = {t: p[t] / sum(p[e] for e in expected) for t in expected}
    likely = {t for t in expected if p[t] > 10 / n}
    assert likely <= found
    # The frequencies follow the probabilities; the bound is far in the tail of chi-square.
    counts = np.bincount(np.asarray(out.tokens), minlength=VOCAB)
    chi = sum((counts[t] - n * p[t]) ** 2 / (n * p[t]) for t in likely)
    assert chi < len(likely) + 6 * np.sqrt(2 * len(likely)) + 10


def test_cutoff_of_candidates_equals_cutoff_of_all_tokens():
    scaled = random_logits(8, 3)
    odds = jnp.exp(jnp.asarray(scaled - scaled.max(axis=1, keepdims=True)))
    given = rows(8, top_k=[0, 3, 0, 0, 9, 40, 0, 1], top_p=[0.5, 1, 0.9, 1, 0.8, 0.99, 0.7, 1])
    few = cutoff_of_best(jax.lax.top_k(odds, 128)[0], jnp.sum(odds, axis=-1), given)
    every = kept_of_all(odds, jnp.sum(odds, axis=-1), given)
    unfiltered = (given.top_k == 0) & (given.top_p >= 1)
    bounds = np.where(unfiltered, 0, few)[:, None]
    np.testing.assert_array_equal(np.asarray(odds) >= bounds, every)
    for row, kept in enumerate(np.asarray(every)):
        top_k, top_p = int(given.top_k[row]), float(given.top_p[row])
        expected = reference_support(scaled[row], 1.0, top_k, top_p, 0.0)
        assert set(np.flatnonzero(kept).tolist()) == expected


def test_sampled_row_is_independent_of_other_rows():
    logits = random_logits(1, 5)
    mine = {"seed": 11, "position": 40, "temperature": 1.0, "top_k": 10}
    alone, _ = draw(logits, rows(1, **mine))
    # Other rows require the branches over the whole vocabulary and with a full sort.
    others = random_logits(3, 6, scale=0.1)
    given = rows(
        4,
        seed=[11, 1, 2, 3],
        position=[40, 0, 0, 0],
        temperature=[1.0, 1.0, 9.0, 0.0],
        top_k=[10, 0, 0, 0],
        top_p=[1.0, 1.0, 0.9, 1.0],
    )
    among, _ = draw(np.concatenate([logits, others]), given)
    assert among.tokens[0] == alone.tokens[0]
    moved, _ = draw(np.repeat(logits, 8, 0), rows(8, **{**mine, "position": np.arange(8)}))
    assert len(set(moved.tokens.tolist())) > 1


def test_penalties_and_bias_follow_their_formulas():
    logits = random_logits(2, 7)
    state = SamplerState.create(4, VOCAB)
    bias = np.zeros(VOCAB, np.float32)
    bias[4], bias[5] = 2.5, -np.inf
    seen = np.zeros(VOCAB, np.int32)
    seen[10], seen[11], seen[12] = 1, 2 * 3, 2 * 1 + 1  # prompt; 3 times; once and in the prompt
    state = state.put(jnp.int32(2), jnp.asarray(bias), jnp.asarray(seen))
    given = rows(
        2, slot=[2, 99], repetition_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.7
    )
    out = np.asarray(adjust(jnp.asarray(logits), given, state))
    expected = logits[0].copy()
    for token, count in ((10, 0), (11, 3), (12, 1)):
        x = expected[token]
        x = x / 1.5 if x > 0 else x * 1.5
        expected[token] = x - 0.3 * count - 0.7 * (count > 0)
    expected += bias
    np.testing.assert_allclose(out[0], expected, rtol=1e-6)
    np.testing.assert_array_equal(out[1], logits[1])
    sampled, after = draw(logits, given, state)
    change = np.asarray(after.seen - state.seen)
    assert change[0].sum() == change[1].sum() == change[3].sum() == 0
    assert change.sum() == 2
    assert change[2, int(sampled.tokens[0])] == 2


def test_logprobs_are_those_of_the_model():
    logits = random_logits(3, 9)
    state = SamplerState.create(4, VOCAB)
    state = state.put(jnp.int32(0), jnp.full(VOCAB, -np.inf).at[17].set(0), state.seen[0])
    out, _ = draw(logits, rows(3, num_logprobs=[4, -1, -1], slot=[0, 99, 99]), state)
    exact = logits[0].astype(np.float64)
    exact -= np.log(np.exp(exact).sum())
    assert int(out.tokens[0]) == 17
    assert out.logprob[0] == pytest.approx(exact[17], abs=1e-5)
    assert int(out.rank[0]) == 1 + (exact > exact[17]).sum()
    order = np.argsort(-exact)[:5]
    assert out.top_ids[0].tolist() == order.tolist()
    np.testing.assert_allclose(out.top_logprobs[0], exact[order], atol=1e-5)
    packed = np.asarray(out.pack())
    assert packed.shape == (3, 13)
    assert packed[0, 1:2].view(np.float32)[0] == out.logprob[0]


FILTERS = {
    "temperature": {},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "top_k and top_p": {"top_k": 40, "top_p": 0.7},
    "min_p": {"min_p": 0.05},
    "many candidates": {"top_p": 0.999},
    "a large top_k": {"top_k": 200, "top_p": 0.95},
}


@pytest.mark.daily("0.7-temperature", "0.7-top_k and top_p")
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.3])
def test_processed_logprobs_are_those_of_the_sampled_distribution(name, temperature):
    n = 64
    logits = np.repeat(random_logits(1, 21), n, axis=0)
    state = SamplerState.create(4, VOCAB)
    bias = np.zeros(VOCAB, np.float32)
    bias[int(logits[0].argmax())] = -np.inf
    state = state.put(jnp.int32(1), jnp.asarray(bias), state.seen[0])
    given = rows(
        n,
        slot=[1] + [99] * (n - 1),
        position=np.arange(n),
        num_logprobs=5,
        processed=[1] * (n - 1) + [0],
        temperature=temperature,
        **FILTERS[name],
    )
    out, _ = draw(logits, given, state)
    adjusted = logits.astype(np.float64) + np.r_[[bias], np.zeros((n - 1, VOCAB))]
    filters = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **FILTERS[name]}
    exact = np.zeros_like(adjusted)
    for row, own in enumerate(adjusted):
        support = list(reference_support(own, temperature, **filters))
        odds = np.exp((own[support] - own.max()) / temperature)
        exact[row, support] = odds / odds.sum()
    chosen = exact[np.arange(n), np.asarray(out.tokens)]
    np.testing.assert_allclose(np.exp(out.logprob[:-1]), chosen[:-1], rtol=2e-5)
    plain = np.exp(logits[-1] - logits[-1].max())
    raw = plain[int(out.tokens[-1])] / plain.sum()
    assert np.exp(out.logprob[-1]) == pytest.approx(raw, rel=1e-4), "a row with the model's"
    best = np.sort(exact[1])[::-1][:5]
    np.testing.assert_allclose(np.exp(out.top_logprobs[1]), best, rtol=2e-5)


def test_processed_logprobs_exclude_a_removed_token_that_is_almost_as_likely_as_the_last_kept_one():
    logits = np.full((1, VOCAB), -30, np.float32)
    logits[0, :4] = 1.0, 0.5, 0.100005, 0.1
    given = rows(1, num_logprobs=0, processed=1, temperature=0.7, top_k=3)
    out, _ = draw(logits, given)
    odds = np.exp(logits[0, :3].astype(np.float64) / 0.7)
    expected = np.log(odds / odds.sum())[int(out.tokens[0])]
    assert float(out.logprob[0]) == pytest.approx(expected, abs=1e-5)


def test_processed_logprobs_of_a_greedy_row_have_its_masks_and_temperature_one():
    logits = random_logits(2, 5)
    state = SamplerState.create(4, VOCAB)
    bias = np.zeros(VOCAB, np.float32)
    bias[int(logits[0].argmax())] = -np.inf
    state = state.put(jnp.int32(0), jnp.asarray(bias), state.seen[0])
    out, _ = draw(logits, rows(2, slot=[0, 99], num_logprobs=0, processed=1), state)
    exact = jax.nn.log_softmax(logits + np.stack([bias, np.zeros(VOCAB)]))
    chosen = np.asarray(exact)[np.arange(2), np.asarray(out.tokens)]
    np.testing.assert_allclose(out.logprob, chosen, atol=1e-5)


#: Options of a step of eight rows, for each branch of a sampler with one switch.
KINDS = {
    "greedy": {},
    "random": {"temperature": [0.0, 1.0] * 4},
    "filters": {"temperature": 1.0, "top_k": [0, 5] * 4, "top_p": 0.9},
    "penalties": {"temperature": 1.0, "slot": [2, *[99] * 7], "frequency_penalty": 0.5},
    "scores": {"temperature": [0.0, 1.0] * 4, "num_logprobs": [-1] * 7 + [2], "processed": 1},
    "mirostat": {"temperature": 1.0, "slot": 1, "mirostat": [2, *[0] * 7]},
    "drafts": {"proposal": [-1, 3, 4, -1, 5, -1, -1, 7]},
    "grammar": {"temperature": 1.0},
}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_sampler_with_one_branch_has_the_results_of_one_with_a_branch_for_each_option(kind):
    logits = jnp.asarray(random_logits(8, 11))
    given = rows(8, seed=np.arange(8), position=3, **KINDS[kind])
    flat, state = [getattr(given, name) for name in NAMES], SamplerState.create(4, VOCAB)
    state = state.put(jnp.int32(2), state.bias[0].at[7].set(3.0), state.seen[0].at[9].set(4))
    allowed = jnp.full((8, -(-VOCAB // 32)), -1, jnp.int32)
    allowed = allowed.at[3].set(5) if kind == "grammar" else allowed

    def run_sampler(flat, *, is_switched: bool):
        out, after, _ = sample_with_mask(
            *(logits, SamplerRows(*flat), state, 3, allowed), masks=False, is_switched=is_switched
        )
        plain = sample_plain(logits, SamplerRows(*flat), 3, is_switched=is_switched)
        return out.pack(), after, plain.pack()

    found, expected = (
        jax.tree.leaves(jax.jit(partial(run_sampler, is_switched=switched))(flat))
        for switched in (True, False)
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_step_on_a_gpu_has_one_branch():
    given, state = rows(8), SamplerState.create(4, VOCAB)
    allowed = jnp.zeros((8, -(-VOCAB // 32)), jnp.int32)
    counts = []
    for switched in (True, False):
        program = jax.make_jaxpr(
            lambda logits, switched=switched: sample_with_mask(
                *(logits, given, state, 3, allowed), masks=False, is_switched=switched
            )[0].pack()
        )(jnp.zeros((8, VOCAB)))
        counts.append(sum(one.primitive.name == "cond" for one in program.eqns))
    assert counts[0] == 1 < counts[1]
