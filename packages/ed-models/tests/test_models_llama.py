"""One Llama: trained, generated from and served by one `__call__`, on any mesh, at any depth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.testing import LLAMA3_ROPE, tiny_llama
from ed_layers.cache import RaggedBatch
from ed_layers.losses import token_logprobs
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from flax import nnx

ONE = (1, 1, 1, 1, 1)
B, S = 8, 24
rng = np.random.default_rng(0)
IDS = rng.integers(3, 256, (B, S)).astype(np.int32)
# Packed rows: two or three documents and some padding at the end.
SEGMENTS = np.stack(
    [np.repeat([1, 2, 3, 0], [7 + i % 3, 9, 8 - i % 3 - 2, 2])[:S] for i in range(B)]
)


def config(**changes):
    fields = tiny_llama(num_hidden_layers=3, rope_parameters=LLAMA3_ROPE, initializer_range=0.08)
    del fields["model_type"]
    return LlamaConfig(**{**fields, "sharding_axis_dims": ONE, **changes})


def forward(model, **inputs):
    """Call a jitted model as its consumers do: with flat leaves and a closed-over graphdef."""
    graphdef, state = nnx.split(model)
    return jax.jit(lambda state, inputs: nnx.merge(graphdef, state)(**inputs))(state, inputs)


@pytest.fixture(scope="module")
def model():
    return LlamaForCausalLM.create(config(), seed=1)


@pytest.fixture(scope="module")
def plain(model):
    return np.asarray(forward(model, input_ids=IDS).logits)


@pytest.fixture(scope="module", params=["stacked", "leaves"])
def either(request, model):
    return model.to_layout(request.param)


@pytest.mark.nightly
def test_scanned_llama_matches_unrolled_llama(model, plain):
    unrolled = LlamaForCausalLM.create(config(scan_layers=False), seed=1)
    assert (model.layout, unrolled.layout) == ("stacked", "leaves")
    np.testing.assert_allclose(forward(unrolled, input_ids=IDS).logits, plain, atol=1e-5)
    again = model.to_layout("leaves").to_layout("stacked")
    np.testing.assert_array_equal(forward(again, input_ids=IDS).logits, plain)


@pytest.mark.nightly
@pytest.mark.parametrize("steps", [[S], [10, 5, 1, 1, 7]], ids=["at_once", "in_steps"])
def test_dense_cache_equals_no_cache(either, plain, steps):
    cache, at, outs = either.init_cache(B, 32), 0, []
    for n in steps:
        out = forward(either, input_ids=IDS[:, at : at + n], past_key_values=cache)
        cache, at = out.past_key_values, at + n
        outs.append(out.logits)
    np.testing.assert_allclose(np.concatenate(outs, axis=1), plain, atol=1e-5)


@pytest.mark.nightly
def test_ragged_pages_equal_no_cache(either, plain):
    """Chunked prefill and decode of four rows in one flat batch, on scattered pages."""
    page, rows, width = 4, 4, 8
    cache = either.init_paged_cache(num_pages=40, page_size=page)
    table = np.random.default_rng(1).permutation(40)[: rows * width].reshape(rows, width)
    done = np.zeros(rows, int)
    got = [[] for _ in range(rows)]
    for counts in ([9, 1, 0, 4], [1, 12, 20, 1], [14, 1, 1, 3]):
        flat, slots, seq_of = [], [], []
        for row, n in enumerate(counts):
            at = np.arange(done[row], done[row] + n)
            flat += list(IDS[row, at])
            slots += list(table[row, at // page] * page + at % page)
            seq_of += [row] * n
        done += counts
        pad = 40 - len(flat)
        ragged = RaggedBatch(
            cu_q_lens=jnp.asarray(np.cumsum([0, *counts]), jnp.int32),
            kv_lens=jnp.asarray(done, jnp.int32),
            seq_of_token=jnp.asarray(seq_of + [0] * pad, jnp.int32),
            slots={"full": jnp.asarray(slots + [10**6] * pad, jnp.int32)},
            page_table={"full": jnp.asarray(table, jnp.int32)},
            state_slots=jnp.zeros(rows, jnp.int32),
            num_seqs=jnp.asarray(rows, jnp.int32),
        )
        ids = np.asarray([flat + [0] * pad], np.int32)
        out = forward(either, input_ids=ids, past_key_values=cache, ragged=ragged)
        cache = out.past_key_values
        ends = np.cumsum([0, *counts])
        for row in range(rows):
            got[row].append(np.asarray(out.logits)[0, ends[row] : ends[row + 1]])
    for row in range(rows):
        logits = np.concatenate(got[row])
        np.testing.assert_allclose(logits, plain[row, : len(logits)], atol=1e-5)


@pytest.mark.proves("EasyDeLBaseModule", "EasyDeLBaseModule.__call__")
def test_logits_at_picks_from_the_flattened_batch(model, plain):
    at = np.asarray([0, 5, S, B * S - 1], np.int32)
    out = forward(model, input_ids=IDS, logits_at=at)
    np.testing.assert_allclose(out.logits, plain.reshape(-1, plain.shape[-1])[at], atol=1e-5)
    none = jax.jit(lambda: model(IDS, logits_at="none"))()
    assert none.logits is None


@pytest.mark.nightly
def test_head_and_chunked_logprobs_agree(model, plain):
    out = forward(model, input_ids=IDS)
    hidden = out.last_hidden_state.reshape(-1, model.config.hidden_size)
    targets = IDS.reshape(-1)
    logp, _ = token_logprobs(hidden, model.lm_head_weight(), targets, chunk=50)
    full = jax.nn.log_softmax(plain.reshape(len(targets), -1))[np.arange(len(targets)), targets]
    np.testing.assert_allclose(logp, full, atol=1e-5)


@pytest.mark.proves("MaskInfo")
def test_a_packed_row_equals_its_documents_apart(model):
    packed = np.asarray(forward(model, input_ids=IDS, segment_ids=SEGMENTS).logits)
    for row, segment in [(0, 1), (1, 2), (2, 3)]:
        at = np.flatnonzero(SEGMENTS[row] == segment)
        alone = forward(model, input_ids=IDS[row : row + 1, at]).logits[0]
        np.testing.assert_allclose(packed[row, at], alone, atol=1e-5)


@pytest.mark.nightly
def test_left_padding_does_not_change_logits(model, plain):
    padded = np.pad(IDS, ((0, 0), (5, 0)))
    mask = np.pad(np.ones_like(IDS), ((0, 0), (5, 0)))
    out = forward(model, input_ids=padded, attention_mask=mask)
    np.testing.assert_allclose(out.logits[:, 5:], plain, atol=1e-5)


def loss_and_grads(model):
    graphdef, params, other = model.split_module()

    def loss(params):
        merged = model.merge_module(graphdef, params, other)
        output, _ = merged.compute_loss(IDS, segment_ids=SEGMENTS)
        return output.loss

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    return float(value), {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(grads)}


@pytest.fixture(scope="module")
def expected(model):
    return loss_and_grads(model)


def assert_same(got, expected, tolerance=1e-5):
    np.testing.assert_allclose(got[0], expected[0], rtol=tolerance)
    for path, value in expected[1].items():
        worst = np.abs(got[1][path] - value).max()
        assert worst <= tolerance * np.abs(value).max(), (path, worst)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": "nothing_saveable"},
        {
            "gradient_checkpointing": "save_only_these_names",
            "gradient_checkpointing_targets": ["attn_output", "mlp_down"],
        },
        {"attn_mechanism": "blockwise", "blocksize_q": 8, "blocksize_k": 8},
    ],
    ids=["remat", "remat_by_name", "blockwise"],
)
def test_memory_options_do_not_change_gradients(changes, expected):
    assert_same(loss_and_grads(LlamaForCausalLM.create(config(**changes), seed=1)), expected)


@pytest.mark.nightly
@pytest.mark.proves("compute_loss")
def test_compute_loss_is_the_mean_over_counted_tokens(model):
    labels = IDS.copy()
    labels[:, :5] = -100
    logits = np.asarray(forward(model, input_ids=IDS, segment_ids=SEGMENTS).logits, np.float64)
    logp = np.asarray(jax.nn.log_softmax(logits[:, :-1]))
    target = labels[:, 1:]
    keep = (target != -100) & (SEGMENTS[:, 1:] == SEGMENTS[:, :-1]) & (SEGMENTS[:, 1:] != 0)
    picked = np.take_along_axis(logp, np.where(keep, target, 0)[..., None], -1)[..., 0]
    output, count = model.compute_loss(IDS, labels=labels, segment_ids=SEGMENTS)
    assert int(count) == keep.sum()
    np.testing.assert_allclose(output.loss, -picked[keep].mean(), rtol=1e-5)


@pytest.mark.daily("leaves")
def test_hidden_states_are_the_inputs_of_each_layer(either):
    out = forward(either, input_ids=IDS)
    assert out.hidden_states is None
    kept = jax.jit(lambda: either(IDS, output_hidden_states=True))()
    assert len(kept.hidden_states) == 4
    np.testing.assert_array_equal(kept.hidden_states[0], either.model.embed_tokens(IDS))
