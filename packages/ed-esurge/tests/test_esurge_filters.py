"""Typical-p, top-n-sigma, XTC, mirostat and DRY equal their published definitions in numpy."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_esurge import eSurge
from ed_esurge.repetition import RepetitionPenalty, Repetitions
from ed_esurge.runner.filters import FilterRows, get_allowed_bits, kept_tokens
from ed_esurge.runner.row_numbers import FLOAT_FIELDS, OF_FILTERS, OF_SAMPLING
from ed_esurge.runner.sampler import sample
from ed_esurge.runner.sampler_rows import SamplerState
from ed_esurge.sampling import SamplingParams
from ed_esurge.thinking import LimitedThoughts, ThinkingBudget

VOCAB = 200
DEFAULTS = {"slot": 0, "temperature": 1.0, "top_p": 1.0, "typical_p": 1.0, "xtc_threshold": 0.1}
DEFAULTS |= {"repetition_penalty": 1.0, "num_logprobs": -1, "mirostat_tau": 5.0}
NAMES = ("position", *OF_SAMPLING, *OF_FILTERS)
UNLIMITED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def numbers(n=1, **given):
    """Return the numbers of `n` rows by name, as `SlotTables.filtered` does."""
    lines = []
    for name in NAMES:
        value = np.broadcast_to(np.asarray(given.get(name, DEFAULTS.get(name, 0))), (n,))
        lines.append(value.astype(np.float32 if name in FLOAT_FIELDS else np.int32).view(np.int32))
    return np.stack(lines)


@jax.jit
def kept(logits, numbers):
    scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
    return kept_tokens(scaled, FilterRows.of(numbers), jnp.zeros(len(logits)))


def mask(logits, **given):
    return np.asarray(kept(jnp.asarray(logits, jnp.float32)[None], numbers(**given)))[0]


def softmax(logits):
    odds = np.exp(logits - logits.max())
    return odds / odds.sum()


# The definitions, for one list of logits: they return the set of kept tokens.


def numpy_typical(logits, p):
    """arXiv:2202.00666 and `llama_sampler_typical`: sort by |surprise - entropy|, keep up to p."""
    probs = softmax(logits)
    entropy = -(probs * np.log(probs)).sum()
    total, result = 0.0, set()
    for token in np.argsort(np.abs(-np.log(probs) - entropy), kind="stable"):
        result.add(int(token))
        total += probs[token]
        if total > p:
            break
    return result


def numpy_top_n_sigma(logits, n):
    """arXiv:2411.07641 and `llama_sampler_top_n_sigma`: at least max - n * (standard deviation)."""
    return {int(t) for t in np.flatnonzero(logits >= logits.max() - n * np.std(logits))}


def numpy_xtc(logits, threshold):
    """`llama_sampler_xtc`: of the tokens above the threshold, only the last of the sorted stays."""
    probs = softmax(logits)
    order = np.argsort(-probs, kind="stable")
    above = [int(t) for t in order if probs[t] >= threshold]
    removed = above[:-1] if len(above) >= 2 else []
    return set(range(len(logits))) - set(removed)


def numpy_mirostat(logits, mu, version):
    """arXiv:2007.14966 and `llama_sampler_mirostat(_v2)`: the tokens that the limit mu keeps."""
    probs = softmax(logits)
    order = np.argsort(-probs, kind="stable")
    if version == 2:
        inside = [int(t) for t in order if -math.log2(probs[t]) <= mu]
        return set(inside) or {int(order[0])}
    best = probs[order][:100]
    upper = lower = 0.0
    for i in range(len(best) - 1):
        t, b = math.log((i + 2) / (i + 1)), math.log(best[i] / best[i + 1])
        upper, lower = upper + t * b, lower + t * t
    zipf = upper / lower
    epsilon = zipf - 1
    k = ((epsilon * 2**mu) / (1 - len(probs) ** (-epsilon))) ** (1 / zipf)
    return {int(t) for t in order[: max(int(k), 1)]}


def numpy_dry(tokens, multiplier, base, allowed, breakers):
    """`llama_sampler_dry`, by comparing the end of the tokens with the end of every prefix."""
    penalties = {}
    for end in range(1, len(tokens)):
        length = 0
        while (
            length < end
            and tokens[end - 1 - length] == tokens[-1 - length]
            and tokens[-1 - length] not in breakers
        ):
            length += 1
        following = tokens[end]
        if length >= allowed and following not in breakers:
            penalty = multiplier * base ** (length - allowed)
            penalties[following] = max(penalties.get(following, 0), penalty)
    return penalties


def some_logits(seed, spread=2.0):
    return np.random.default_rng(seed).normal(0, spread, VOCAB).astype(np.float32)


def tokens_of(found):
    return {int(token) for token in np.flatnonzero(found)}


@pytest.mark.parametrize("seed", range(5))
def test_filters_keep_the_tokens_of_their_definitions(seed):
    logits = some_logits(seed).astype(np.float64)
    for p in (0.1, 0.5, 0.9, 0.99):
        assert tokens_of(mask(logits, typical_p=p)) == numpy_typical(logits, p)
    for n in (0.5, 1.0, 2.0):
        assert tokens_of(mask(logits, top_n_sigma=n)) == numpy_top_n_sigma(logits, n)
    for threshold in (0.02, 0.05, 0.2, 0.6):
        found = mask(logits, xtc_probability=1.0, xtc_threshold=threshold)
        assert tokens_of(found) == numpy_xtc(logits, threshold)
    assert mask(logits, xtc_probability=0.0, typical_p=1.0).all()


def test_filters_apply_in_the_order_of_the_sampler_chain():
    logits = some_logits(7).astype(np.float64)
    given = {"top_n_sigma": 2.5, "top_k": 30, "typical_p": 0.9, "top_p": 0.8, "min_p": 0.05}
    found = tokens_of(mask(logits, **given, xtc_probability=1.0, xtc_threshold=0.1))
    left = sorted(numpy_top_n_sigma(logits, 2.5), key=lambda token: -logits[token])[:30]
    left = [left[place] for place in sorted(numpy_typical(logits[left], 0.9))]
    total, nucleus = 0.0, []
    for token in left:
        if total < 0.8:
            nucleus.append(token)
        total += softmax(logits[left])[left.index(token)]
    least = 0.05 * np.exp(logits[nucleus]).max()
    strong = [token for token in nucleus if np.exp(logits[token]) >= least]
    strong = [strong[place] for place in sorted(numpy_xtc(logits[strong], 0.1))]
    assert found == set(strong)


@jax.jit
def step(logits, options, unlimited, state):
    """Sample as the engine does: the sampler reads the mask of the filters and has no limits."""
    everything = jnp.full((len(logits), -(-VOCAB // 32)), -1, jnp.int32)
    allowed = get_allowed_bits(logits, options, state, everything)
    out, state = sample(logits, FilterRows.of(unlimited).sampling, state, 1, allowed)
    return out.tokens, state


def drawn(logits, state, n=1, **given):
    logits = jnp.asarray(np.broadcast_to(logits, (n, VOCAB)), jnp.float32)
    tokens, state = step(logits, numbers(n, **given), numbers(n, **given, **UNLIMITED), state)
    return np.asarray(tokens), state


def test_xtc_removes_top_choices_with_its_probability():
    logits = np.zeros(VOCAB)
    logits[:3] = 10, 9, 8
    count = 300
    options = {"position": np.arange(count), "xtc_probability": 0.3}
    tokens, _ = drawn(logits, SamplerState.create(1, VOCAB), count, **options)
    # XTC removes the first token, because the second also exceeds the threshold of 0.1.
    share = np.mean(tokens == 0)
    assert share == pytest.approx(0.7 * softmax(logits)[0], abs=0.08)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.daily("2")
def test_mirostat_controls_the_surprise_as_defined(version):
    state = SamplerState.create(1, VOCAB)
    tau, eta = 3.0, 0.2
    mu = 2 * tau
    state = state.put(0, state.bias[0], state.seen[0], jnp.float32(mu))
    surprises = []
    for position in range(40):
        logits = some_logits(position).astype(np.float64)
        options = {"mirostat": version, "mirostat_tau": tau, "mirostat_eta": eta}
        tokens, state = drawn(logits, state, position=position, seed=5, **options)
        token = int(tokens[0])
        allowed = numpy_mirostat(logits, mu, version)
        assert token in allowed
        inside = sorted(allowed)
        surprise = -math.log2(softmax(logits[inside])[inside.index(token)])
        mu -= eta * (surprise - tau)
        assert float(state.mu[0]) == pytest.approx(mu, abs=1e-3)
        surprises.append(surprise)
    assert np.mean(surprises[15:]) == pytest.approx(tau, abs=0.7)


def dry(penalty, tokens, known):
    """Return the penalties of a sequence that grows after its first `known` tokens."""
    repetitions = Repetitions(penalty, tokens[:known])
    for token in tokens[known:]:
        repetitions.append(token)
    return dict(zip(*(x.tolist() for x in repetitions.penalties()), strict=True))


def test_dry_penalties_equal_a_comparison_of_all_ends():
    rng = np.random.default_rng(0)
    for _ in range(200):
        tokens = rng.integers(0, 4, rng.integers(1, 60)).tolist()
        known = int(rng.integers(1, len(tokens) + 1))
        breakers = {3} if rng.random() < 0.5 else set()
        allowed = int(rng.integers(1, 4))
        penalty = RepetitionPenalty(0.8, 1.75, allowed, None, frozenset(breakers))
        expected = numpy_dry(tokens, 0.8, 1.75, allowed, breakers)
        assert dry(penalty, tokens, known) == pytest.approx(expected)
        last = RepetitionPenalty(0.8, 1.75, allowed, 10, frozenset(breakers))
        expected = numpy_dry(tokens[-10:], 0.8, 1.75, allowed, breakers)
        assert dry(last, tokens, known) == pytest.approx(expected)
    long = dry(RepetitionPenalty(1e6, 1e6), [7] * 5000, 4900)
    assert np.isfinite(np.float32(long[7]))


def forced(budget, tokens):
    return LimitedThoughts(budget, tokens).forced


def test_end_of_thoughts_is_forced_once_the_budget_is_used():
    budget = ThinkingBudget(tokens=3, end_token_ids=(7, 8))
    assert forced(budget, [1, 2]) is None
    assert forced(budget, [1, 2, 3]) == 7
    assert forced(budget, [1, 2, 7]) == 8  # the model has begun the end itself
    assert forced(budget, [1, 2, 3, 7]) == 8
    assert forced(budget, [1, 2, 3, 7, 8]) is None
    assert forced(budget, [7, 8, 1, 2, 3]) is None
    begun = ThinkingBudget(tokens=2, end_token_ids=(7, 8), start_token_ids=(5,))
    assert forced(begun, [1, 2, 3, 4]) is None
    assert forced(begun, [1, 5, 2, 3]) == 7
    assert forced(ThinkingBudget(tokens=0, end_token_ids=(7,)), []) == 7


@pytest.mark.nightly
def test_request_with_a_thinking_budget_ends_its_thoughts(surge):
    budget = ThinkingBudget(tokens=4, end_token_ids=(40, 41, 42))
    params = SamplingParams(max_tokens=12, temperature=0, thinking_budget=budget)
    plain = surge.generate([5, 9, 7], SamplingParams(max_tokens=12, temperature=0))[0]
    tokens = surge.generate([5, 9, 7], params)[0].outputs[0].token_ids
    assert tokens[:4] == plain.outputs[0].token_ids[:4]
    assert tokens[4:7] == [40, 41, 42]
    assert len(tokens) == 12


@pytest.mark.nightly
def test_samplers_of_a_request_follow_the_logits_of_the_model(surge, plain_logits):
    """Through the engine, each token is in the set that the definition keeps."""
    prompt = [5, 9, 5, 9, 5, 9, 40]

    def positions(**options):
        params = SamplingParams(max_tokens=12, seed=3, temperature=1.0, **options)
        tokens = surge.generate(prompt, params)[0].outputs[0].token_ids
        logits = plain_logits([*prompt, *tokens])
        return [(token, logits[len(prompt) - 1 + at], at) for at, token in enumerate(tokens)]

    for token, logits, _ in positions(typical_p=0.3):
        assert token in numpy_typical(logits, 0.3)
    for token, logits, _ in positions(top_n_sigma=1.0):
        assert token in numpy_top_n_sigma(logits, 1.0)
    for token, logits, _ in positions(xtc_probability=1.0, xtc_threshold=0.01):
        assert token in numpy_xtc(logits, 0.01)
    mu = 2 * 2.0
    for token, logits, _ in positions(mirostat=2, mirostat_tau=2.0, mirostat_eta=0.5):
        inside = sorted(numpy_mirostat(logits, mu, 2))
        surprise = -math.log2(softmax(logits[inside])[inside.index(token)])
        mu -= 0.5 * (surprise - 2.0)
    params = SamplingParams(max_tokens=12, temperature=0, dry_multiplier=1e4, dry_allowed_length=1)
    tokens = surge.generate(prompt, params)[0].outputs[0].token_ids
    logits = plain_logits([*prompt, *tokens])
    for at, token in enumerate(tokens):
        before = [*prompt, *tokens[:at]]
        adjusted = logits[len(before) - 1].copy()
        for other, penalty in numpy_dry(before, 1e4, 1.75, 1, set()).items():
            adjusted[other] -= penalty
        assert token == int(adjusted.argmax())


@pytest.mark.nightly
def test_filtered_requests_of_a_large_batch_equal_each_request_alone(llama, tokenizer):
    """More rows with filters than the program of the filters has, among rows without filters."""
    sizes = {"max_num_seqs": 16, "page_size": 8, "max_num_batched_tokens": 64}
    surge = eSurge(llama, tokenizer, max_model_len=128, silent_mode=True, **sizes)
    options = [{"typical_p": 0.3}, {"top_n_sigma": 1.0}, {"mirostat": 2, "mirostat_tau": 2.0}]
    options += [{"xtc_probability": 1.0, "xtc_threshold": 0.01}, {"top_k": 5}, {}]
    params = [
        SamplingParams(max_tokens=6, seed=at, logprobs=1, logprobs_mode="processed_logprobs", **x)
        for at, x in enumerate(options * 3)
    ]
    prompts = [[5, 9, 7, at] for at in range(len(params))]
    together = surge.generate(prompts, params)
    for prompt, given, output in zip(prompts, params, together, strict=True):
        alone = surge.generate(prompt, given)[0].outputs[0]
        assert output.outputs[0].token_ids == alone.token_ids
        for token, scores in zip(alone.token_ids, alone.logprobs, strict=True):
            assert scores[token].logprob > -20
