"""Small configurations of a model type of `transformers`, for its trace and its conformance cases.

Fields get distinct values, so that a factor in the trace names the field that it comes from.
"""

from __future__ import annotations

from typing import Any

from ed_models.conformance import TINY

#: Number of layers of a configuration whose layers differ.
LAYERS = 4
WINDOW_TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
#: Fields that a small configuration sets if the type has them.
SMALL: dict[str, Any] = {
    "head_dim": 12,
    "sliding_window": 6,
    "attention_window": 6,
    "window_size": 6,
    "use_sliding_window": True,
    "layer_types": WINDOW_TYPES,
    "attention_types": [[["global", "local"], 2]],
    "layer_rope_theta": [10000.0, 0, 500000.0, 10000.0],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_topk": 3,
    "moe_k": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "n_shared_experts": 2,
    "num_shared_experts": 2,
    "moe_num_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "routed_scaling_factor": 1.5,
    "router_scaling_factor": 1.5,
    "route_scale": 1.5,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "embedding_multiplier": 1.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.3,
    "scale_emb": 1.9,
    "scale_depth": 0.9,
    "dim_model_base": 24,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
    "rotary_dim": 4,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
}
#: Fields that make the layers differ.
DIFFERENT_LAYERS = {
    *("layer_types", "mlp_layer_types", "first_k_dense_replace", "num_dense_layers"),
    "attention_types",
}
#: Fields of the second configuration: those that add biases, tie the head, or change a sum.
TOGGLED: dict[str, Any] = {
    "attention_bias": True,
    "mlp_bias": True,
    "use_bias": True,
    "qkv_bias": True,
    "use_qkv_bias": True,
    "use_qk_norm": True,
    "qk_layernorm": True,
    "norm_topk_prob": True,
    "scale_embedding": True,
    "mup_enabled": True,
    "tie_word_embeddings": True,
}
#: Sizes of which a model has several, so a second configuration changes them.
OTHER_SIZES: dict[str, Any] = {"head_dim": 8, "num_experts_per_tok": 2, "num_experts": 6}


def list_fields(config_class: Any) -> dict[str, Any]:
    """Return the architecture fields of a configuration class, with their annotations."""
    own = {n: f for n, f in config_class.__dataclass_fields__.items() if not n.startswith("_")}
    return {name: field.type for name, field in own.items()}


def has_field(config_class: Any, name: str) -> bool:
    """Return whether a configuration class has a field, perhaps under another name."""
    return name in list_fields(config_class) or name in config_class.attribute_map


def build_rows(config_class: Any) -> dict[str, dict[str, Any]]:
    """Return two small configurations: the usual one, and one with the other choices.

    Each entry contains the fields that differ from `ed_models.conformance.TINY`; None leaves a
    field of `TINY` out.
    """
    fields = list_fields(config_class)
    sizes = [name for name in TINY if not name.endswith("_token_id")]
    absent = {name: None for name in sizes if not has_field(config_class, name)}
    first = absent | {name: value for name, value in SMALL.items() if name in fields}
    if DIFFERENT_LAYERS & first.keys():
        first["num_hidden_layers"] = LAYERS
    if {"kv_lora_rank", "num_key_value_heads"} <= fields.keys():
        first["num_key_value_heads"] = TINY["num_attention_heads"]
    toggled = {name: value for name, value in TOGGLED.items() if name in fields}
    second = first | toggled
    second |= {n: v for n, v in OTHER_SIZES.items() if n in first}
    return {"usual fields": first, "other choices": second}


def name_second_row(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Return a name of the second configuration, from the fields that it changes."""
    changed = {name for name, value in second.items() if first.get(name) != value}
    words = []
    if any("bias" in name for name in changed):
        words.append("biases")
    if any("norm" in name for name in changed):
        words.append("norms")
    if "tie_word_embeddings" in changed:
        words.append("tied")
    return ", ".join(words) or "other sizes"
