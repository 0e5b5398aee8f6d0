"""Each option that changes logits against `transformers`' own processor, on the same logits."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.testing import require_torch
from ed_models.generation.generated_rows import GeneratedRows
from ed_models.generation.processors import PROCESSORS
from ed_models.generation.timestamps import TimestampRules
from ed_models.generation.token_choice import TokenChoice, process

B, T, V, NEW, LIMIT = 4, 24, 37, 5, 9
EOS = (7, 11)
RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((B, V)).astype(np.float32) * 2.5
# Few tokens, so that n-grams repeat.
IDS = RNG.integers(0, 6, (B, T))
#: Tokens from 3 on are times.
TIMES = TimestampRules(first=3, end=1, without=2, most_initial=30)
WHISPER = SimpleNamespace(no_timestamps_token_id=2, eos_token_id=1, max_initial_timestamp_index=30)
#: Tokens of the encoder.
SOURCE = RNG.integers(0, 6, (B, 8))
BIASES = {
    (3,): -4.0,
    (int(IDS[0, -1]), 5): 2.0,
    (*map(int, IDS[1, -2:]), 5): 1.5,
    (0, 1, 2, 8): 9.0,
}
BANS = [[4], [7], [int(IDS[0, -1]), 9], [*map(int, IDS[2, -3:]), 2]]

#: (name, value, class in transformers, its arguments, shape of the rows)
CASES = [
    ("sequence_bias", BIASES, "SequenceBias", (BIASES,), {}),
    ("sequence_bias", [[list(k), v] for k, v in BIASES.items()], "SequenceBias", (BIASES,), {}),
    ("encoder_repetition_penalty", 1.7, "EncoderRepetitionPenalty", (1.7, SOURCE), {}),
    ("encoder_repetition_penalty", 0.6, "EncoderRepetitionPenalty", (0.6, SOURCE), {}),
    ("repetition_penalty", 1.7, "RepetitionPenalty", (1.7,), {}),
    ("repetition_penalty", 0.6, "RepetitionPenalty", (0.6,), {}),
    ("no_repeat_ngram_size", 1, "NoRepeatNGram", (1,), {}),
    ("no_repeat_ngram_size", 2, "NoRepeatNGram", (2,), {}),
    ("no_repeat_ngram_size", 3, "NoRepeatNGram", (3,), {}),
    ("no_repeat_ngram_size", T + 1, "NoRepeatNGram", (T + 1,), {}),
    *(
        ("timestamp_rules", TIMES, "WhisperTimeStamp", (WHISPER, T - new), {"new": new})
        for new in (0, 1, 2, NEW)
    ),
    *(
        ("encoder_no_repeat_ngram_size", size, "EncoderNoRepeatNGram", (size, SOURCE), {})
        for size in (1, 2, 3, 9)
    ),
    ("bad_words_ids", BANS, "NoBadWords", (BANS, list(EOS)), {}),
    ("min_new_tokens", NEW, "MinNewTokensLength", (T - NEW, NEW, list(EOS)), {}),
    ("min_new_tokens", NEW + 1, "MinNewTokensLength", (T - NEW, NEW + 1, list(EOS)), {}),
    ("forced_bos_token_id", 5, "ForcedBOSToken", (5,), {"t": 1, "new": 0}),
    ("forced_bos_token_id", 5, "ForcedBOSToken", (5,), {}),
    ("forced_eos_token_id", [7, 2], "ForcedEOSToken", (T + 1, [7, 2]), {"new": LIMIT - 1}),
    ("forced_eos_token_id", 7, "ForcedEOSToken", (T + 5, 7), {}),
    ("remove_invalid_values", True, "InfNanRemove", (), {"spoilt": True}),
    (
        "exponential_decay_length_penalty",
        (2, 1.3),
        "ExponentialDecayLengthPenalty",
        ((2, 1.3), list(EOS), T - NEW),
        {},
    ),
    (
        "exponential_decay_length_penalty",
        (5, 1.3),
        "ExponentialDecayLengthPenalty",
        ((5, 1.3), list(EOS), T - NEW),
        {},
    ),
    ("suppress_tokens", [1, 36], "SuppressTokens", ([1, 36],), {}),
    ("begin_suppress_tokens", [1, 36], "SuppressTokensAtBegin", ([1, 36], T), {"new": 0}),
    ("begin_suppress_tokens", [1, 36], "SuppressTokensAtBegin", ([1, 36], T - NEW), {}),
    ("temperature", 0.3, "Temperature", (0.3,), {}),
    ("top_k", 5, "TopK", (5,), {}),
    ("top_k", 500, "TopK", (500,), {}),
    *(("top_p", p, "TopP", (p,), {}) for p in (0.05, 0.5, 0.95)),
    *(("min_p", p, "MinP", (p,), {}) for p in (0.02, 0.3, 1.0)),
    *(("typical_p", p, "Typical", (p,), {}) for p in (0.05, 0.5, 0.95)),
    *(("epsilon_cutoff", p, "Epsilon", (p,), {}) for p in (0.01, 0.1, 0.9)),
    *(("eta_cutoff", p, "Eta", (p,), {}) for p in (0.003, 0.1, 0.9)),
    ("renormalize_logits", True, "LogitNormalization", (), {}),
]


def rows_of(ids=IDS, new=NEW):
    count = jnp.full((len(ids),), new, jnp.int32)
    return GeneratedRows(
        jnp.asarray(ids, jnp.int32),
        count,
        jnp.int32(LIMIT),
        jnp.asarray(EOS, jnp.int32),
        source=jnp.asarray(SOURCE, jnp.int32),
    )


def spoilt(logits):
    logits = logits.copy()
    logits[0, :3] = np.nan, np.inf, -np.inf
    return logits


def processed(logits, rows, at_least=1, **options):
    @jax.jit
    def run(choice, logits, rows):
        return process(logits, choice, rows, at_least=at_least).spread()

    return np.asarray(run(TokenChoice(do_sample=True, **options), jnp.asarray(logits), rows))


def theirs(kind, arguments, ids, logits, **options):
    torch = require_torch()
    from transformers.generation import logits_process

    names = (f"{kind}{ending}" for ending in ("LogitsProcessor", "LogitsWarper", ""))
    found = next(filter(None, (getattr(logits_process, name, None) for name in names)))
    arguments = [torch.tensor(x) if isinstance(x, np.ndarray) else x for x in arguments]
    return found(*arguments, **options)(torch.tensor(ids), torch.tensor(logits)).numpy()


@pytest.mark.parametrize(("name", "value", "kind", "arguments", "shape"), CASES)
@pytest.mark.daily("top_p-*", "timestamp_rules-*", "typical_p-*", "sequence_bias-*")
def test_logits_processors_match_transformers(name, value, kind, arguments, shape):
    ids = IDS[:, -shape.get("t", T) :]
    logits = spoilt(LOGITS) if "spoilt" in shape else LOGITS
    expected = theirs(kind, arguments, ids, logits)
    got = processed(logits, rows_of(ids, shape.get("new", NEW)), **{name: value})
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_every_processor_option_has_a_comparison():
    """The other options have separate tests below."""
    own = {"presence_penalty", "frequency_penalty", "logits_processor", "timestamp_rules"}
    assert {case[0] for case in CASES} | own == set(PROCESSORS)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("top_k", 1, "TopK"),
        ("top_p", 0.01, "TopP"),
        ("min_p", 1.0, "MinP"),
        ("epsilon_cutoff", 0.9, "Epsilon"),
        ("eta_cutoff", 0.99, "Eta"),
    ],
)
def test_filters_leave_enough_for_beams(name, value, kind):
    got = processed(LOGITS, rows_of(), at_least=3, **{name: value})
    expected = theirs(kind, (value,), IDS, LOGITS, min_tokens_to_keep=3)
    assert np.isfinite(got).sum(axis=1).min() == 3
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.nightly
def test_all_together_in_transformers_order():
    torch = require_torch()
    from transformers import GenerationConfig
    from transformers.generation.utils import GenerationMixin

    options = {
        "sequence_bias": [[[5], 1.5]],
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 4,
        "bad_words_ids": BANS,
        "min_new_tokens": NEW + 1,
        "exponential_decay_length_penalty": (1, 1.1),
        "suppress_tokens": [2],
        "temperature": 1.4,
        "top_k": 25,
        "top_p": 0.95,
        "min_p": 0.01,
        "typical_p": 0.9,
        "epsilon_cutoff": 0.004,
        "eta_cutoff": 0.004,
        "renormalize_logits": True,
    }
    config = GenerationConfig(do_sample=True, max_length=T + 9, **options)
    config._eos_token_tensor = torch.tensor(EOS)

    class Model(GenerationMixin):
        class config:
            is_encoder_decoder = False

    ids = torch.tensor(IDS)
    chain = Model()._get_logits_processor(config, input_ids_seq_length=T - NEW)
    expected = chain(ids, torch.tensor(LOGITS)).numpy()
    assert 3 < np.isfinite(expected).sum() < B * V / 2
    got = processed(LOGITS, rows_of(), **options)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_presence_and_frequency_penalties_count_generated_tokens():
    ids = np.asarray([[8, 8, 1, 2, 2, 3]])
    for name, counts in (("presence_penalty", [1, 1]), ("frequency_penalty", [2, 1])):
        got = processed(LOGITS[:1], rows_of(ids, new=3), **{name: 0.5})
        expected = LOGITS[:1].copy()
        expected[0, [2, 3]] -= 0.5 * np.asarray(counts)
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_processors_ignore_left_padding():
    """Left padding does not change the scores of a row."""
    options = {
        "no_repeat_ngram_size": 2,
        "repetition_penalty": 1.5,
        "bad_words_ids": [[0, 3], [4]],
        "sequence_bias": {(1, 2): 3.0},
        "frequency_penalty": 0.3,
    }
    alone = processed(LOGITS, rows_of(IDS[:, -6:], new=2), **options)
    padded = np.pad(IDS[:, -6:], ((0, 0), (11, 0)), constant_values=-1)
    np.testing.assert_array_equal(processed(LOGITS, rows_of(padded, new=2), **options), alone)


def test_custom_logits_processors_are_applied_in_order():
    def shift(input_ids, scores):
        assert input_ids.shape == (B, T)
        return scores.at[:, 0].set(jnp.where(input_ids[:, -1] > 2, -jnp.inf, scores[:, 0]))

    def double(input_ids, scores):
        return scores * 2

    got = processed(LOGITS, rows_of(), logits_processor=[shift, double])
    expected = LOGITS * 2
    expected[IDS[:, -1] > 2, 0] = -np.inf
    np.testing.assert_allclose(got, expected)
    with pytest.raises(ValueError, match="it must keep the shape"):
        processed(LOGITS, rows_of(), logits_processor=lambda ids, scores: scores[:, :3])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("sequence_bias", 3, "it must be {"),
        ("sequence_bias", [[3, 1.0]], "has 3; each sequence must be a list"),
        ("sequence_bias", {(3,): float("nan")}, "has a bias of nan"),
        ("sequence_bias", {(3,): "x"}, "has a bias of 'x'"),
        ("bad_words_ids", [[]], r"has \[\]; each sequence"),
        ("bad_words_ids", [[-1]], r"has \[-1\]; each sequence"),
        ("bad_words_ids", 5, "has 5; each sequence"),
        ("bad_words_ids", [[1] * 1025], "1 sequences of up to 1025 tokens; at most"),
        ("presence_penalty", 3, "is 3; it must be between -2 and 2"),
        ("no_repeat_ngram_size", -1, "is -1; it must be a whole number of at least 0, at most"),
        ("min_new_tokens", 2.5, "is 2.5; it must be a whole number"),
        ("forced_bos_token_id", [1, 2], r"is \[1, 2\]; it must be a token id"),
        ("forced_eos_token_id", -1, "is -1; it must be token ids"),
        ("suppress_tokens", ["x"], "it must be a token id, or several"),
        ("exponential_decay_length_penalty", 3, r"must be \(start, factor\)"),
        ("exponential_decay_length_penalty", (1, -2.0), r"must be \(start, factor\)"),
        ("logits_processor", 3, r"has 3; it must be functions \(input_ids, scores\)"),
        ("typical_p", 0, "is 0; it must be above 0 and at most 1"),
        ("epsilon_cutoff", 1.0, "is 1.0; it must be at least 0 and below 1"),
        ("renormalize_logits", 1, "is 1; it must be True or False"),
    ],
)
def test_invalid_processor_values_raise_config_error(name, value, message):
    with pytest.raises(ConfigError, match=message):
        TokenChoice(do_sample=True, **{name: value})


def test_an_unknown_option_gets_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'top_p'"):
        TokenChoice(top_pp=3)
    with pytest.raises(AttributeError, match="did you mean 'top_p'"):
        _ = TokenChoice().top_pp


@pytest.mark.torch
@pytest.mark.parametrize("new", [0, 1, 2, 5])
def test_rules_of_timestamps_match_transformers(new: int) -> None:
    torch = require_torch()
    from transformers import GenerationConfig
    from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

    first, end, rows = 24, 20, 64
    rng = np.random.default_rng(new)
    # Text, or times that increase: the rules expect times in this order.
    ids = rng.integers(0, end, (rows, T))
    times = np.sort(rng.integers(first, V, (rows, T)), axis=1)
    ids = np.where(rng.random((rows, T)) < 0.4, times, ids)
    logits = rng.standard_normal((rows, V)).astype(np.float32) * 2.5
    settings = GenerationConfig(eos_token_id=end, bos_token_id=end)
    settings.no_timestamps_token_id, settings.max_initial_timestamp_index = first - 1, 4
    reference = WhisperTimeStampLogitsProcessor(settings, begin_index=T - new)
    expected = reference(torch.tensor(ids), torch.tensor(logits)).numpy()
    rules = TimestampRules(first=first, end=end, without=first - 1, most_initial=4)
    got = processed(logits, rows_of(ids, new), timestamp_rules=rules)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
