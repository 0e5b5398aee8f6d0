"""`generate` against a plain loop without cache, and its independence of padding and batch."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_models.generation import decoding
from flax import nnx

LENGTH, NEW = 12, 10


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=48,
        eos_token_id=None,
        bos_token_id=None,
        initializer_range=0.3,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    return LlamaForCausalLM.create(config, seed=2)


@pytest.fixture(scope="module")
def prompt():
    return np.random.default_rng(0).integers(1, 64, (3, LENGTH))


@pytest.fixture(scope="module")
def greedy(model, prompt):
    """[3, NEW], by running the whole sequence again for each token."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def best(state, ids, n):
        return jnp.argmax(nnx.merge(graphdef, state)(ids).logits[:, n - 1], axis=-1)

    ids = np.zeros((3, LENGTH + NEW), np.int32)
    ids[:, :LENGTH] = prompt
    for n in range(LENGTH, LENGTH + NEW):
        ids[:, n] = best(state, ids, n)
    return ids[:, LENGTH:]


@pytest.mark.nightly
@pytest.mark.proves("EasyGenerationMixin", "generate")
def test_equals_a_loop_without_cache(model, prompt, greedy):
    out = model.generate(prompt, max_new_tokens=NEW)
    np.testing.assert_array_equal(out.sequences[:, :LENGTH], prompt)
    np.testing.assert_array_equal(out.sequences[:, LENGTH:], greedy)


@pytest.mark.nightly
def test_padding_and_other_rows_change_nothing(model, prompt, greedy):
    ids = np.full((2, LENGTH + 9), 63)
    mask = np.zeros_like(ids)
    ids[0, 9:], mask[0, 9:] = prompt[2], 1
    ids[1, 3:-6], mask[1, 3:-6] = prompt[0], 1  # on the right, too
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW)
    np.testing.assert_array_equal(out.sequences[:, LENGTH + 9 :], greedy[[2, 0]])


@pytest.mark.nightly
def test_pad_token_id_marks_left_padding(model, prompt, greedy):
    ids = np.zeros((1, LENGTH + 4), int)
    ids[0, 4:] = prompt[1]
    out = model.generate(ids, max_new_tokens=NEW, pad_token_id=0)
    np.testing.assert_array_equal(out.sequences[0, LENGTH + 4 :], greedy[1])


@pytest.mark.nightly
def test_draws_do_not_depend_on_padding_batch_or_length(model, prompt):
    options = {"do_sample": True, "temperature": 1.5, "seed": 4, "top_k": 40, "top_p": 0.95}
    whole = model.generate(prompt, max_new_tokens=NEW, **options).sequences[:, LENGTH:]
    again = model.generate(prompt, max_new_tokens=NEW, **options).sequences[:, LENGTH:]
    np.testing.assert_array_equal(whole, again)
    ids = np.concatenate([np.zeros((1, 5), int), prompt[:1]], axis=1)
    alone = model.generate(ids, max_new_tokens=NEW + 4, pad_token_id=0, **options).sequences
    np.testing.assert_array_equal(alone[0, LENGTH + 5 :][:NEW], whole[0])
    other = model.generate(prompt, max_new_tokens=NEW, **{**options, "seed": 5}).sequences
    assert (other[:, LENGTH:] != whole).any()


@pytest.mark.nightly
def test_the_rows_of_two_seeds_have_nothing_in_common(model, prompt):
    same = np.repeat(prompt[:1], 8, axis=0)
    options = {"do_sample": True, "temperature": 3.0, "max_new_tokens": NEW}
    rows = [
        {tuple(row) for row in model.generate(same, seed=seed, **options).sequences}
        for seed in (0, 1)
    ]
    assert len(rows[0]) == len(rows[1]) == 8
    assert not rows[0] & rows[1]
    # A row draws the same in a smaller batch.
    few = model.generate(same[:3], seed=1, **options).sequences
    assert {tuple(row) for row in few} <= rows[1]


@pytest.mark.nightly
def test_rows_end_at_an_end_token(model, prompt, greedy):
    end = int(greedy[0, 3])
    assert end not in greedy[0, :3]
    out = model.generate(prompt, max_new_tokens=NEW, eos_token_id=[end], pad_token_id=0)
    new = out.sequences[:, LENGTH:]
    np.testing.assert_array_equal(new[0, :4], greedy[0, :4])
    assert not new[0, 4:].any()
    for row in (1, 2):
        stop = [*greedy[row], end].index(end)
        np.testing.assert_array_equal(new[row, :stop], greedy[row, :stop])


@pytest.mark.nightly
def test_eos_token_id_none_disables_the_end_token(model, prompt, greedy):
    end = int(greedy[0, 3])
    ends = LlamaForCausalLM.create(model.config.replace(eos_token_id=end), seed=2)
    ends.generation_json = json.dumps({"eos_token_id": end})
    options = {"max_new_tokens": NEW, "pad_token_id": 0}
    assert not ends.generate(prompt[:1], **options).sequences[0, LENGTH + 4 :].any()
    for config in (None, {"eos_token_id": end}):
        out = ends.generate(prompt, config, **options, eos_token_id=None)
        np.testing.assert_array_equal(out.sequences[:, LENGTH:], greedy)
    # `None` in a configuration means the value of the checkpoint.
    out = ends.generate(prompt[:1], {"eos_token_id": None}, **options)
    assert out.sequences.shape == (1, LENGTH + 4)


def test_stops_when_every_row_has_ended(model, prompt, greedy):
    out = model.generate(prompt[:1], max_new_tokens=NEW, eos_token_id=int(greedy[0, 3]))
    assert out.sequences.shape == (1, LENGTH + 4)


@pytest.mark.nightly
def test_unrolled_model_generates_same_tokens(model, prompt, greedy):
    out = model.to_layout("leaves").generate(prompt, max_new_tokens=NEW)
    np.testing.assert_array_equal(out.sequences[:, LENGTH:], greedy)


@pytest.mark.nightly
def test_eight_devices_say_the_same(model, prompt, greedy):
    # 3 rows do not divide over 4 devices of fsdp, nor 2 key heads over... they do over tp = 2.
    config = model.config.replace(sharding_axis_dims=(1, 4, 1, 2, 1))
    sharded = LlamaForCausalLM.create(config, seed=2)
    out = sharded.generate(prompt, max_new_tokens=NEW)
    np.testing.assert_array_equal(out.sequences[:, LENGTH:], greedy)


@pytest.fixture
def traced(monkeypatch):
    """How often each program was traced since the last look."""
    counts = {"prefill": 0, "decode": 0}
    call, choose = LlamaForCausalLM.__call__, decoding.process

    def counted_call(self, tokens, *args, **kwargs):
        counts["prefill"] += tokens.shape[1] > 1
        return call(self, tokens, *args, **kwargs)

    def counted_choice(*args, **kwargs):
        counts["decode"] += 1
        return choose(*args, **kwargs)

    def look():
        seen = counts["prefill"], counts["decode"] > 0
        counts.update(prefill=0, decode=0)
        return seen

    monkeypatch.setattr(LlamaForCausalLM, "__call__", counted_call)
    monkeypatch.setattr(decoding, "process", counted_choice)
    decoding.prefill_program.cache_clear()
    decoding.token_program.cache_clear()
    return look


@pytest.mark.nightly
def test_similar_lengths_share_compiled_programs(model, prompt, traced):
    for cut, new, first in ((3, 4, True), (5, 16, False), (LENGTH, 9, False)):
        model.generate(prompt[:, :cut], max_new_tokens=new)
        assert traced() == (int(first), first)
    model.generate(prompt, max_new_tokens=17)  # a longer cache
    assert traced() == (1, True)


@pytest.mark.nightly
def test_numbers_of_sampling_share_programs(model, prompt, traced):
    def new(**options):
        model.generate(prompt, max_new_tokens=4, do_sample=True, **options)
        return traced()

    assert new() == (1, True)
    assert new(temperature=0.3) == new(temperature=2, seed=9) == (0, False)
    # Another structure is another loop; never another prefill.
    assert new(top_p=0.9, min_p=0.1) == (0, True)
    assert new(top_p=0.5, min_p=0.2, temperature=1.1) == (0, False)
    assert new(repetition_penalty=1.1, top_k=5) == (0, True)
    assert new(repetition_penalty=1.7, top_k=5) == (0, False)
    model.generate(prompt, max_new_tokens=4)
    assert traced() == (0, True)


class TestRefused:
    def test_one_dimensional_input_ids_raise_config_error(self, model):
        with pytest.raises(ConfigError, match=r"shape \[4\]; it must be \[rows, tokens\]"):
            model.generate(np.ones(4, int))

    def test_attention_mask_of_other_shape_raises_config_error(self, model, prompt):
        with pytest.raises(ConfigError, match="they must be equal"):
            model.generate(prompt, attention_mask=np.ones((3, 4)))

    def test_fully_padded_row_raises_config_error(self, model, prompt):
        mask = np.ones_like(prompt)
        mask[1] = 0
        with pytest.raises(ConfigError, match="row 1 of input_ids contains only padding"):
            model.generate(prompt, attention_mask=mask)

    def test_too_many_new_tokens_raise_config_error(self, model, prompt):
        with pytest.raises(ConfigError, match="request at most 36 new tokens"):
            model.generate(prompt, max_new_tokens=40)

    @pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
    def test_empty_input_ids_raise_config_error(self, model, shape):
        with pytest.raises(ConfigError, match=r"it must be \[rows, tokens\], at least one of each"):
            model.generate(np.ones(shape, int))

    def test_ragged_input_ids_raise_config_error(self, model):
        with pytest.raises(ConfigError, match="different lengths; pad them on the left"):
            model.generate([[1, 2], [3]])

    @pytest.mark.parametrize("dtype", [float, bool, str])
    def test_non_integer_input_ids_raise_config_error(self, model, prompt, dtype):
        with pytest.raises(ConfigError, match=r"has dtype .*; token ids are whole numbers"):
            model.generate(prompt.astype(dtype))

    @pytest.mark.parametrize("token", [-1, 64, 2**40])
    def test_a_token_that_is_not_in_the_vocabulary(self, model, prompt, token):
        ids = prompt.copy()
        ids[1, 2] = token
        message = rf"token {token} \(row 1, position 2 .* vocabulary of 64 tokens"
        with pytest.raises(ConfigError, match=message):
            model.generate(ids)

    def test_padding_ids_do_not_affect_generated_tokens(self, model, prompt, greedy):
        ids = np.pad(prompt, ((0, 0), (2, 0)), constant_values=-100)
        out = model.generate(ids, attention_mask=ids >= 0, max_new_tokens=NEW)
        np.testing.assert_array_equal(out.sequences[:, LENGTH + 2 :], greedy)

    @pytest.mark.parametrize("seed", [-1, 2**32, 1.0, True, None])
    def test_a_seed_out_of_range(self, model, prompt, seed):
        with pytest.raises(ConfigError, match=r"seed is .*; it must be an integer"):
            model.generate(prompt, seed=seed)
