"""µP: factors on initial values and learning rates, against the table of the paper."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_models.tasks.widths import compute_width_factors, scale_parameters
from flax import nnx

BASE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
#: Four times as wide as the base model; the feed-forward layer is twice as wide.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 40,
}
BASE_WITH_GROUPS = {**BASE, "num_key_value_heads": 1}


def build_model(model_type: str = "llama", **fields: Any) -> Any:
    """A model whose parameters are shapes."""
    config = registry.get_config(model_type)(**{**SIZES, **fields})
    module = registry.get_module(TaskType.CAUSAL_LM, model_type)
    with nnx.use_eager_sharding(False):
        return nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0)))


def test_factors_of_a_decoder_are_those_of_the_table() -> None:
    factors = compute_width_factors(build_model(), BASE_WITH_GROUPS)
    layer = "model.layers.1."
    for name, m in (
        ("self_attn.q_proj", 4),
        ("self_attn.k_proj", 4),
        ("self_attn.o_proj", 4),
        ("mlp.up_proj", 4),
        ("mlp.down_proj", 2),
    ):
        kind, scale, rate = factors[f"{layer}{name}.kernel"]
        assert (kind, scale, rate) == ("hidden", m**-0.5, 1 / m)
    assert factors["lm_head.kernel"] == ("output", 1 / 4, 1 / 4)
    for name in ("model.embed_tokens.embedding", "model.norm.weight", f"{layer}input_layernorm"):
        name = name if name in factors else f"{name}.weight"
        assert factors[name] == ("other", 1.0, 1.0)
    same_keys = compute_width_factors(build_model(), BASE | {"num_key_value_heads": 2})
    assert same_keys[f"{layer}self_attn.v_proj.kernel"] == ("output", 1 / 4, 1 / 4)


def test_widths_of_the_base_change_nothing() -> None:
    fields = {**BASE_WITH_GROUPS, "head_dim": 16}
    factors = compute_width_factors(build_model(**fields), fields)
    assert {(scale, rate) for _, scale, rate in factors.values()} == {(1.0, 1.0)}


def test_experts_are_hidden_and_their_router_is_an_output() -> None:
    fields = {"num_local_experts": 4, "num_experts_per_tok": 2}
    factors = compute_width_factors(build_model("mixtral", **fields), BASE_WITH_GROUPS)
    kinds = {
        name.split("layers.0.")[1]: one for name, one in factors.items() if "layers.0." in name
    }
    assert kinds["mlp.gate.kernel"] == ("output", 1 / 4, 1 / 4)
    experts = {name: one for name, one in kinds.items() if ".experts." in name}
    assert {one.kind for one in experts.values()} == {"hidden"}
    assert experts["mlp.experts.down_proj.kernel"].rate == 1 / 2
    with pytest.raises(ConfigError, match="number of experts is not a width"):
        compute_width_factors(
            build_model("mixtral", **fields), BASE_WITH_GROUPS | {"num_local_experts": 2}
        )


def test_tied_head_is_divided_by_the_width_in_the_final_norm() -> None:
    factors = compute_width_factors(build_model(tie_word_embeddings=True), BASE_WITH_GROUPS)
    assert factors["model.norm.weight"] == ("other", 1 / 4, 1 / 4)
    assert factors["model.embed_tokens.embedding"] == ("other", 1.0, 1.0)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_scores_are_divided_by_the_head_dimension(model_type: str) -> None:
    """The factor on the queries turns d^-1/2 into base^1/2 / d."""
    model = build_model(model_type, head_dim=64)
    factors = compute_width_factors(model, {**BASE_WITH_GROUPS, "head_dim": 16})
    prefix = "model.layers.0.self_attn."
    projection, norm = factors[f"{prefix}q_proj.kernel"], factors.get(f"{prefix}q_norm.weight")
    scaled, plain = (projection.rate * 4, 1) if norm is None else (norm.rate, projection.rate * 4)
    assert (scaled, plain) == (pytest.approx((16 / 64) ** 0.5), pytest.approx(1.0))
    assert factors[f"{prefix}k_proj.kernel"].rate == 1 / 4


def test_depth_scales_the_last_matrices_of_a_layer() -> None:
    model = build_model("qwen2")
    plain = compute_width_factors(model, BASE_WITH_GROUPS)
    deep = compute_width_factors(model, {**BASE_WITH_GROUPS, "num_hidden_layers": 1})
    changed = {name for name, one in deep.items() if one != plain[name]}
    assert {name.split(".", 3)[3] for name in changed} == {
        "self_attn.o_proj.kernel",
        "mlp.down_proj.kernel",
    }
    for name in changed:
        assert deep[name].scale == pytest.approx(plain[name].scale / 3)
        assert deep[name].rate == pytest.approx(plain[name].rate / 3)
    with pytest.raises(ConfigError, match="which this family norms"):
        compute_width_factors(build_model("olmo2"), {**BASE_WITH_GROUPS, "num_hidden_layers": 1})


@pytest.mark.parametrize(
    ("model_type", "fields", "base", "words"),
    [
        ("gemma2", {"head_dim": 16}, BASE, "function of hidden_size"),
        ("llama", {}, {"hidden_size": 64}, "set num_attention_heads"),
        ("llama", {}, {**BASE, "vocab_size": 20}, "keep the number of rows"),
        ("llama", {"mtp_head": "new"}, BASE, "has an MTP layer"),
        ("falcon_h1", {}, BASE, "no row for"),
        ("granite", {}, {**BASE, "num_attention_heads": 4}, "separate scale"),
    ],
)
def test_model_without_a_row_is_refused(
    model_type: str, fields: dict[str, Any], base: dict[str, int], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        compute_width_factors(build_model(model_type, **fields), base)


def test_initial_values_are_multiplied_also_of_stacked_layers_and_offset_norms() -> None:
    config = registry.get_config("llama")(**SIZES, tie_word_embeddings=True, scan_layers=True)
    module = registry.get_module(TaskType.CAUSAL_LM, "llama")
    model, plain = (module.create(config, seed=1) for _ in range(2))
    model.model.norm.offset = 1.0  # as in a norm that multiplies by 1 + weight
    scale_parameters(model, compute_width_factors(model, BASE_WITH_GROUPS))
    layer, other = (m.model.layers.run_0_3_1[0].self_attn for m in (model, plain))
    assert jnp.array_equal(layer.q_proj.kernel.get_value(), other.q_proj.kernel.get_value() / 2)
    assert np.allclose(model.model.norm.weight.get_value(), 2 / 4 - 1)
    table, other_table = (m.model.embed_tokens.embedding for m in (model, plain))
    assert jnp.array_equal(table.get_value(), other_table.get_value())
