"""Methods and attributes of EasyDeL's models, states and outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import easydel as ed
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ed_esurge.outputs import CompletionOutput, RequestMetrics, RequestOutput, accumulate_texts
from ed_infra.errors import ConfigError
from flax import nnx

IDS = jnp.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def model() -> Any:
    config = ed.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        sharding_axis_dims=(1, 1, 1, 1, 1),
        scan_layers=False,
    )
    return ed.LlamaForCausalLM(config, rngs=nnx.Rngs(0)).shard_model()


def test_trees_of_parameters_can_be_taken_out_and_put_back(model: Any) -> None:
    doubled = jax.tree.map(lambda x: 2 * x, model.split_params())
    assert _same(model.merge_params(doubled).params, doubled)
    names = model.split_params_dict()
    assert _same(model.merge_params_dict(names).params, model.params)
    with pytest.raises(ConfigError, match="model/norm/absent is no parameter"):
        model.merge_params_dict({"model": {"norm": {"absent": jnp.ones(1)}}})
    shapes = jax.tree.map(lambda x: x.shape, model.params)
    assert jax.tree.map(lambda x: x.shape, model.graphtree_params_shape) == shapes
    lazy = ed.LlamaForCausalLM.lazy_init(model.config)
    assert jax.tree.map(lambda x: x.shape, lazy.params) == shapes
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(lazy.params))


def test_adapters_can_be_taken_out_and_put_back(model: Any) -> None:
    adapted = model.apply_lora_to_layers(2, ".*q_proj.*", lora_alpha=4)
    ones = jax.tree.map(jnp.ones_like, adapted.split_lora_params())
    assert _same(adapted.merge_lora_params(ones).split_lora_params(), ones)
    assert _same(adapted.merge_lora_params(ones).params, adapted.merge_params(ones).params)
    merged = adapted.merge_lora_params(ones).merge_lora_params()
    assert not merged.lora_is_enabled
    logits = adapted.merge_lora_params(ones)(IDS).logits
    np.testing.assert_allclose(merged(IDS).logits, logits, atol=1e-5)


def test_dtypes_of_parameters_and_activations_change(model: Any) -> None:
    half = model.half()
    assert half.module_dtype == half.dtype == half.model.dtype == jnp.float16
    assert half.float(change_runtime_dtype=False).dtype == jnp.float16
    assert model.to_dtype(jnp.bfloat16).module_dtype == jnp.bfloat16
    assert model.module_dtype == model.dtype == jnp.float32, "the model itself is unchanged"


def test_parts_of_a_model_have_easydels_names(model: Any) -> None:
    assert model.get_decoder() is model.model
    assert model.get_embedding() is model.model.embed_tokens
    assert model.get_lm_head() is model.lm_head
    assert model.loss_function == model.compute_loss
    specs = nnx.to_flat_state(model._specs_sharding())
    assert len(specs) == len(model._shard_fns()) == len(model._gather_fns())
    for path, place in list(model._shard_fns().items())[:2]:
        array = dict(nnx.to_flat_state(nnx.state(model)))[path].get_value()
        np.testing.assert_array_equal(place(array), array)
    for is_gather in (False, True):
        tree = model._apply_sharding_fns(model.params, is_gather=is_gather)
        assert _same(tree, model.params)
    assert _same(model.fully_shard(mesh=model.mesh).params, model.fully_gather(mesh=None).params)
    with pytest.raises(ConfigError, match="has no loss"):
        model.model.loss_function  # noqa: B018


def test_flops_of_a_token_equal_the_count_of_its_products(model: Any) -> None:
    config = model.config
    arrays = [x for x in jax.tree.leaves(model.params) if x.ndim == 2]
    matrices = sum(x.size for x in arrays) - config.vocab_size * config.hidden_size
    attention = 4 * config.num_hidden_layers * config.hidden_size * 16
    assert model.flops_per_token(16) == 2 * matrices + attention
    assert model.flops_per_token(16, include_backward=True) == 3 * model.flops_per_token(16)
    head = config.vocab_size * config.hidden_size
    without = model.flops_per_token(16, include_loss=False)
    assert model.flops_per_token(16) - without == 2 * head


def test_call_accepts_labels_and_a_cache_accepts_starts_of_zero(model: Any) -> None:
    output = model(IDS, labels=IDS)
    np.testing.assert_allclose(output.loss, model.compute_loss(IDS)[0].loss, rtol=1e-6)
    assert output.logits is not None
    assert model.init_operations_cache(2, 8, starts=jnp.zeros(2, jnp.int32)).capacity == 8
    with pytest.raises(ConfigError, match="pass the padding of a prompt as attention_mask"):
        model.init_operations_cache(2, 8, starts=jnp.array([0, 1]))


def test_configuration_and_layers_of_a_model_can_be_replaced(model: Any) -> None:
    other = model.update_module(attn_mechanism="vanilla")
    assert other.config.attn_mechanism == "vanilla" != model.config.attn_mechanism
    assert _same(other.params, model.params)
    assert other.model.layers[1].self_attn.mechanism.config.attn_mechanism == "vanilla"
    other.model.layers[-1].self_attn = model.model.layers[0].self_attn
    assert not _same(other.params, model.params)
    with pytest.raises(ConfigError, match="changes the arrays of the model"):
        model.update_module(vocab_size=65)
    with pytest.raises(IndexError):
        model.model.layers[2]
    stacked = ed.LlamaForCausalLM.lazy_init(model.config.replace(scan_layers=True))
    with pytest.raises(ConfigError, match="use scan_layers=False"):
        stacked.model.layers[0]


def test_quantize_accepts_a_configuration_and_its_fields(model: Any) -> None:
    config = ed.EasyDeLQuantizationConfig(dtype=ed.QuantizationType.NF4, group_size=32)
    by_config = model.quantize(quantization_config=config, apply_quantization=True)
    by_fields = model.quantize(method="nf4", group_size=32)
    assert by_config.is_quantized and _same(nnx.state(by_config), nnx.state(by_fields))
    assert model.quantize(config, apply_quantization=False) is model
    with pytest.raises(ConfigError, match="pass rules, quantization_config or fields"):
        model.quantize(config, method="nf4")
    with pytest.raises(ConfigError, match="no field 'bit'"):
        model.quantize(bit=4)


@pytest.mark.nightly
def test_pure_function_and_other_dtypes_compute_what_the_model_computes(
    model: Any, tmp_path: Path
) -> None:
    expected = model(IDS).logits
    np.testing.assert_array_equal(
        model.pure_transform_fn()(model.params, input_ids=IDS).logits, expected
    )
    half = model.to_dtype(jnp.bfloat16).change_dtypes(dtype=jnp.bfloat16)
    np.testing.assert_allclose(half(IDS).logits, expected, atol=0.05)
    state = model.to_state(optimizer=optax.adamw(1e-3))
    assert state.opt_state is not None
    model.to_state().save_state(tmp_path / "state")
    loaded = ed.EasyDeLState.load_state(tmp_path / "state", dtype=jnp.bfloat16)
    assert loaded.model.dtype == jnp.bfloat16 and _same(loaded.graphstate, model.graphstate)
    np.testing.assert_allclose(loaded.model(IDS).logits, expected, atol=0.05)
    model.save_pretrained(tmp_path / "model")
    again = ed.AutoEasyDeLModelForCausalLM.from_pretrained(
        tmp_path / "model", from_torch=True, device=jax.devices()[0], verbose=False
    )
    assert _same(again.params, model.params)


def test_outputs_have_easydels_names() -> None:
    metrics = RequestMetrics(arrival_time=1.0, last_token_time=3.0, num_generated_tokens=6)
    deltas = [
        RequestOutput("a", [1], [CompletionOutput(0, text, [5])], False, metrics, delta=True)
        for text in ("one ", "two")
    ]
    first, second = accumulate_texts(iter(deltas))
    assert (first.delta_text, first.accumulated_text) == ("one ", "one ")
    assert (second.delta_text, second.accumulated_text) == ("two", "one two")
    assert second.get_text() == "two" and second.tokens_per_second == 3.0
    assert second.num_generated_tokens == 6
    complete = RequestOutput("a", [1], [CompletionOutput(0, "all")], True, RequestMetrics(1.0))
    assert complete.accumulated_text == complete.delta_text == "all"
    assert complete.tokens_per_second == 0.0


def _same(one: Any, other: Any) -> bool:
    leaves, others = jax.tree.leaves(one), jax.tree.leaves(other)
    return len(leaves) == len(others) and all(
        np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(leaves, others, strict=True)
    )
