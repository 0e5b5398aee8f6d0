"""Assisted generation produces the tokens of plain decoding in fewer forward passes."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_models.families.mistral import MistralConfig, MistralForCausalLM
from ed_models.generation.assisted import look_up_drafts
from flax import nnx

V, S, NEW = 40, 9, 14
TINY = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "eos_token_id": None,
    "bos_token_id": None,
    "initializer_range": 0.3,
    "sharding_axis_dims": (1, 1, 1, 1, 1),
}


@pytest.fixture(scope="module")
def model():
    return LlamaForCausalLM.create(LlamaConfig(**TINY), seed=2)


def disturbed(model, by=0.15):
    """A model that produces nearly the same tokens."""
    graphdef, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    noisy = [
        x + by * jnp.std(x) * jax.random.normal(k, x.shape)
        for x, k in zip(leaves, keys, strict=True)
    ]
    return nnx.merge(graphdef, jax.tree.unflatten(structure, noisy))


@pytest.fixture(scope="module")
def assistant(model):
    return disturbed(model)


@pytest.fixture(scope="module")
def prompt():
    rng = np.random.default_rng(1)
    ids = rng.integers(4, V, (3, S))
    ids[2, 3:6] = ids[2, 6:9]  # something to look up
    mask = np.ones_like(ids)
    mask[1, :4] = 0
    return {"input_ids": ids, "attention_mask": mask, "max_new_tokens": NEW}


LOOKUP = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"do_sample": True, "seed": 5, "temperature": 0.8}, marks=pytest.mark.nightly),
        {"do_sample": True, "seed": 6, "top_k": 9, "top_p": 0.9, "num_return_sequences": 2},
        {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "suppress_tokens": [9]},
    ],
)
def test_assisted_decoding_produces_same_tokens_as_plain_decoding(
    model, assistant, prompt, options
):
    plain = model.generate(**prompt, **options)
    again = model.generate(**prompt, **options, assistant_model=assistant, num_assistant_tokens=3)
    np.testing.assert_array_equal(again.sequences, plain.sequences)
    looked_up = model.generate(**prompt, **options, **LOOKUP)
    np.testing.assert_array_equal(looked_up.sequences, plain.sequences)
    assert plain.steps == NEW - 1
    if not options:
        assert again.steps < NEW - 1


@pytest.mark.nightly
def test_ends_where_plain_decoding_ends(model, assistant, prompt):
    plain = model.generate(**prompt)
    ends = sorted({int(plain.sequences[0, S + 4]), int(plain.sequences[1, S + 8])})
    plain = model.generate(**prompt, eos_token_id=ends, pad_token_id=1)
    assert (plain.sequences[0, S + 5 :] == 1).all()
    for options in ({"assistant_model": assistant}, LOOKUP):
        again = model.generate(**prompt, **options, eos_token_id=ends, pad_token_id=1)
        np.testing.assert_array_equal(again.sequences, plain.sequences)


@pytest.mark.nightly
def test_perfect_assistant_minimizes_decoding_steps(model, prompt):
    out = model.generate(**prompt, assistant_model=model, num_assistant_tokens=4)
    assert out.steps == -(-(NEW - 1) // 5)


@pytest.mark.nightly
def test_prompt_lookup_drafts_repeated_text(model, prompt):
    """A model that is made to repeat itself: the look-up finds all of it."""
    ids = np.tile(np.arange(5, 9), 4)[None]
    # Always the token that followed last time.
    bias = {(int(a), int(b)): 1e4 for a, b in zip(ids[0, :4], ids[0, 1:5], strict=True)}
    options = {"max_new_tokens": 12, "sequence_bias": bias}
    plain = model.generate(ids, **options)
    np.testing.assert_array_equal(plain.sequences[0], np.tile(np.arange(5, 9), 7))
    again = model.generate(ids, **options, prompt_lookup_num_tokens=5)
    np.testing.assert_array_equal(again.sequences, plain.sequences)
    assert again.steps == 2  # 1 token of the prompt, then 6 and 5


def test_look_up_proposes_tokens_after_matching_ngram():
    ids = jnp.asarray([[-1, -1, 5, 6, 7, 8, 6], [1, 2, 3, 1, 9, 1, 2], [-1, -1, -1, 1, 2, 3, 4]])
    found = jax.jit(look_up_drafts, static_argnums=(1, 2))
    np.testing.assert_array_equal(found(ids, 3, 2), [[7, 8, 6], [3, 1, 9], [-1, -1, -1]])
    np.testing.assert_array_equal(found(ids[1:2], 6, 1), [[3, 1, 9, 1, 2, -1]])


@pytest.mark.nightly
def test_at_the_end_of_the_positions(model, assistant, prompt):
    """Drafts behind the last position of the model are not computed."""
    most = TINY["max_position_embeddings"] - S
    plain = model.generate(prompt["input_ids"], max_new_tokens=most)
    again = model.generate(prompt["input_ids"], max_new_tokens=most, assistant_model=assistant)
    np.testing.assert_array_equal(again.sequences, plain.sequences)


@pytest.mark.nightly
@pytest.mark.parametrize("windowed", ["model", "assistant"])
def test_a_cache_that_cannot_forget_is_computed_again(windowed, prompt):
    config = MistralConfig(**TINY, sliding_window=4, head_dim=4)
    ring = MistralForCausalLM.create(config, seed=2)
    assert not ring.init_cache(1, 32).can_rewind
    full = MistralForCausalLM.create(config.replace(sliding_window=None), seed=2)
    main, helper = (ring, disturbed(ring)) if windowed == "model" else (full, ring)
    plain = main.generate(**prompt)
    again = main.generate(**prompt, assistant_model=helper)
    np.testing.assert_array_equal(again.sequences, plain.sequences)
    assert again.steps < NEW - 1 or windowed == "assistant"


@pytest.mark.nightly
@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rotary_factors_that_follow_length(rope, prompt):
    """The rotary factor of a draft depends on its position, not on later drafts."""
    parameters = {"rope_type": rope, "rope_theta": 10000.0, "factor": 4.0}
    if rope == "longrope":
        parameters |= {
            "short_factor": [1.0, 1.5],
            "long_factor": [2.0, 9.0],
            "original_max_position_embeddings": 12,
        }
    limit = {"max_position_embeddings": 12 if rope == "dynamic" else 48}
    config = LlamaConfig(**TINY | limit, rope_parameters=parameters)
    model = LlamaForCausalLM.create(config, seed=2)
    plain = model.generate(**prompt)
    again = model.generate(**prompt, assistant_model=disturbed(model, 0.05))
    np.testing.assert_array_equal(again.sequences, plain.sequences)
    assert again.steps < NEW - 1


class TestRefused:
    def test_assistant_with_other_vocabulary_raises_config_error(self, model, prompt):
        other = SimpleNamespace(config=LlamaConfig(**TINY | {"vocab_size": 50}))
        with pytest.raises(ConfigError, match="vocabulary of 50 tokens, but the model has 40"):
            model.generate(**prompt, assistant_model=other)

    def test_an_assistant_with_too_few_positions(self, model, prompt):
        short = SimpleNamespace(config=LlamaConfig(**TINY | {"max_position_embeddings": 16}))
        with pytest.raises(ConfigError, match="max_position_embeddings=16"):
            model.generate(**prompt, assistant_model=short)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"num_beams": 2, "prompt_lookup_num_tokens": 2}, "beam search cannot use drafts"),
            ({"output_scores": True, "prompt_lookup_num_tokens": 2}, "need one token per step"),
            ({"num_assistant_tokens": 2}, "has no effect without assistant_model"),
            ({"max_matching_ngram_size": 2}, "no effect without prompt_lookup_num_tokens"),
            ({"prompt_lookup_num_tokens": 65}, "is 65; it must be a whole number"),
        ],
    )
    def test_contradictory_assisted_options_raise_config_error(
        self, model, prompt, options, message
    ):
        with pytest.raises(ConfigError, match=message):
            model.generate(**prompt, **options)

    def test_two_draft_sources_raise_config_error(self, model, prompt):
        with pytest.raises(ConfigError, match="are two ways to draft; choose one"):
            model.generate(**prompt, assistant_model=model, prompt_lookup_num_tokens=2)
