"""Decoders with experts: the rows of mixtures, and of multi-head latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ed_models.checkpoints.gguf.architecture import (
    EXPERT_COUNTS,
    GATES,
    Architecture,
    FileReading,
    FileWriting,
)
from ed_models.checkpoints.gguf.decoders import BIASES
from ed_models.checkpoints.gguf.layouts import LATENT, PAIRS, build_module_rules, values
from ed_models.weights.rules import ignore

if TYPE_CHECKING:
    from ed_infra.config import EasyDeLBaseConfig

_LOCAL: Mapping[str, str | None] = {
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
_ROUTED: Mapping[str, str | None] = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_NO_HEAD_DIM: Mapping[str, str | None] = {"head_dim": None}
_CORRECTION = values({"L.mlp.gate.e_score_correction_bias": "B.exp_probs_b.bias"})
_SINKS = values({"L.self_attn.sinks": "B.attn_sinks.weight"})


def _has_experts(reading: FileReading) -> bool:
    """Whether the layers of a file have experts."""
    return bool(reading.get("expert_count"))


def _read_qwen2(reading: FileReading) -> dict[str, Any]:
    size = reading.get("expert_feed_forward_length") or reading.shape("blk.0.ffn_gate_exps.weight")
    shared = reading.get("expert_shared_feed_forward_length")
    if shared is None and reading.has("blk.0.ffn_up_shexp.weight"):
        shared = reading.shape("blk.0.ffn_up_shexp.weight")[0]
    return {
        "moe_intermediate_size": size if isinstance(size, int) else size[1],
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": False,
    }


def _write_qwen2(writing: FileWriting) -> None:
    config = writing.config
    writing.set("expert_feed_forward_length", config.moe_intermediate_size)
    writing.set("expert_shared_feed_forward_length", config.shared_expert_intermediate_size)


def _read_qwen3(reading: FileReading) -> dict[str, Any]:
    size = reading.get("expert_feed_forward_length") or reading.shape("blk.0.ffn_gate_exps.weight")
    return {
        "moe_intermediate_size": size if isinstance(size, int) else size[1],
        "norm_topk_prob": True,
    }


def _write_expert_size(writing: FileWriting) -> None:
    writing.set("expert_feed_forward_length", writing.config.moe_intermediate_size)


def _read_latent(reading: FileReading) -> dict[str, Any]:
    rotated = reading.need("rope.dimension_count")
    key = reading.get("attention.key_length_mla") or reading.need("attention.key_length")
    outs = reading.get("attention.value_length_mla") or reading.need("attention.value_length")
    settings = {
        "num_key_value_heads": reading.need("attention.head_count"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": outs,
        "q_lora_rank": reading.get("attention.q_lora_rank"),
        "norm_topk_prob": bool(reading.get("expert_weights_norm", False)),
    }
    log = reading.get("rope.scaling.yarn_log_multiplier")
    if log is None:
        return settings
    scale = round(log * 10, 6)  # llama.cpp assumes that both are equal
    return {**settings, "rope_parameters": {"mscale": scale, "mscale_all_dim": scale}}


def _read_deepseek_v2(reading: FileReading) -> dict[str, Any]:
    grouped = (reading.get("expert_group_count") or 1) > 1
    return {
        **_read_latent(reading),
        "topk_method": "group_limited_greedy" if grouped else "greedy",
    }


def _write_latent(writing: FileWriting) -> None:
    config = writing.config
    writing.set("attention.head_count_kv", 1)
    writing.set("attention.key_length", config.kv_lora_rank + config.qk_rope_head_dim)
    writing.set("attention.value_length", config.kv_lora_rank)
    writing.set("attention.key_length_mla", config.qk_nope_head_dim + config.qk_rope_head_dim)
    writing.set("attention.value_length_mla", config.v_head_dim)
    writing.set("rope.dimension_count", config.qk_rope_head_dim)
    writing.set("expert_weights_norm", bool(config.norm_topk_prob))
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("mscale_all_dim") is not None:
        writing.set("rope.scaling.yarn_log_multiplier", 0.1 * float(rope["mscale_all_dim"]))


def _write_v3(writing: FileWriting) -> None:
    _write_latent(writing)
    writing.set("expert_gating_func", _gate("sigmoid"))


def _write_v2(writing: FileWriting) -> None:
    _write_latent(writing)
    writing.set("expert_gating_func", _gate("softmax"))


def _gate(name: str) -> int:
    return next(number for number, gate in GATES.items() if gate == name)


def _is_sigmoid(reading: FileReading) -> bool:
    return GATES.get(reading.get("expert_gating_func", 1)) == "sigmoid"


def _latent_shape(name: str, shape: tuple[int, ...], config: EasyDeLBaseConfig) -> tuple[int, ...]:
    """Return the shape in a file of the keys and values of latents: one matrix for each head."""
    if name.endswith(("attn_k_b.weight", "attn_v_b.weight")):
        heads = config.num_attention_heads
        return (heads, shape[0] // heads, shape[1])
    return shape


_LATENT_FIELDS: Mapping[str, str | None] = {
    **_ROUTED,
    **_NO_HEAD_DIM,
    "num_key_value_heads": None,
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
}


def _read_ernie(reading: FileReading) -> dict[str, Any]:
    return {
        "moe_num_shared_experts": reading.get("expert_shared_count", 0),
        "moe_layer_start_index": reading.get("leading_dense_block_count", 0),
        "moe_layer_interval": reading.get("interleave_moe_layer_step", 1),
    }


def _write_ernie(writing: FileWriting) -> None:
    config = writing.config
    writing.set("expert_shared_count", config.moe_num_shared_experts)
    writing.set("leading_dense_block_count", config.moe_layer_start_index)
    writing.set("interleave_moe_layer_step", config.moe_layer_interval)
    size = config.moe_intermediate_size * (config.moe_num_shared_experts or 0)
    writing.set("expert_shared_feed_forward_length", size)


def _read_alternating(reading: FileReading) -> dict[str, Any]:
    count = reading.need("block_count")
    kinds = ("sliding_attention", "full_attention")
    yarn = reading.get("rope.scaling.type") == "yarn"
    return {
        "layer_types": [kinds[i % 2] for i in range(count)],
        "rope_parameters": {"truncate": False} if yarn else {},
    }


def _write_gpt_oss(writing: FileWriting) -> None:
    writing.set("expert_feed_forward_length", writing.config.intermediate_size)


def _read_phimoe(reading: FileReading) -> dict[str, Any]:
    scale = reading.get("rope.scaling.attn_factor")
    return {"rope_parameters": {"short_mscale": scale, "long_mscale": scale} if scale else {}}


def _write_phimoe(writing: FileWriting) -> None:
    writing.unlike.append("the router is SparseMixer, and llama.cpp mixes experts by a softmax")


def _read_routed(reading: FileReading) -> dict[str, Any]:
    """Read a model whose further layers predict more tokens; the model has only the other ones."""
    mtp_layers = reading.get("nextn_predict_layers") or 0
    return {
        "num_hidden_layers": reading.need("block_count") - mtp_layers,
        "norm_topk_prob": bool(reading.get("expert_weights_norm", False)),
    }


def _write_routed(writing: FileWriting) -> None:
    writing.set("expert_weights_norm", bool(writing.config.norm_topk_prob))
    _write_sigmoid(writing)


def _write_sigmoid(writing: FileWriting) -> None:
    writing.set("expert_gating_func", _gate("sigmoid"))


def _write_dots1(writing: FileWriting) -> None:
    _write_routed(writing)
    config = writing.config
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if groups != heads:
        writing.unlike.append(f"num_key_value_heads is {groups}, and llama.cpp supports {heads}")


def _write_minimax_m2(writing: FileWriting) -> None:
    _write_sigmoid(writing)
    writing.set("expert_feed_forward_length", writing.config.intermediate_size)


EXPERT_ROWS: tuple[Architecture, ...] = (
    Architecture(
        "llama",
        "mixtral",
        rules=PAIRS,
        fields={**_LOCAL, **_NO_HEAD_DIM},
        constants={"sliding_window": None},
        when=_has_experts,
    ),
    Architecture(
        "qwen2moe",
        "qwen2_moe",
        has_head=True,
        names={"L.mlp.shared_expert_gate": "B.ffn_gate_inp_shexp"},
        fields={**EXPERT_COUNTS, **_NO_HEAD_DIM},
        read=_read_qwen2,
        write=_write_qwen2,
    ),
    Architecture(
        "qwen3moe",
        "qwen3_moe",
        required={"attention_bias": False},
        fields=EXPERT_COUNTS,
        present={"attention_bias": BIASES["attention_bias"]},
        read=_read_qwen3,
        write=_write_expert_size,
    ),
    Architecture(
        "olmoe",
        "olmoe",
        has_head=True,
        fields={**EXPERT_COUNTS, **_NO_HEAD_DIM},
        constants={"norm_topk_prob": False},
    ),
    Architecture(
        "granitemoe",
        "granitemoe",
        rules=PAIRS,
        fields={
            **_LOCAL,
            **_NO_HEAD_DIM,
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        present={"attention_bias": BIASES["attention_bias"]},
    ),
    Architecture(
        "deepseek2",
        "deepseek_v3",
        rules=(*LATENT, *_CORRECTION),
        fields=_LATENT_FIELDS,
        when=_is_sigmoid,
        read=_read_latent,
        write=_write_v3,
        reshaped=_latent_shape,
    ),
    Architecture(
        "deepseek2",
        "deepseek_v2",
        required={"topk_method": "greedy"},
        rules=(*LATENT, *_CORRECTION),
        fields=_LATENT_FIELDS,
        read=_read_deepseek_v2,
        write=_write_v2,
        reshaped=_latent_shape,
    ),
    Architecture(
        "deepseek2",
        "kimi_k2",
        rules=(*LATENT, *_CORRECTION),
        fields=_LATENT_FIELDS,
        when=lambda _: False,
        read=_read_latent,
        write=_write_v3,
        reshaped=_latent_shape,
    ),
    Architecture(
        "glm4moe",
        "glm4_moe",
        names={"L.post_attention_layernorm": "B.post_attention_norm"},
        rules=(*_CORRECTION, *(ignore(f"blk.{layer}.{{path}}") for layer in (46, 92))),
        fields=_ROUTED,
        present={
            "attention_bias": BIASES["attention_bias"],
            "use_qk_norm": ("blk.0.attn_q_norm.weight",),
        },
        read=_read_routed,
        write=_write_routed,
    ),
    Architecture(
        "dots1",
        "dots1",
        has_head=True,
        required={"attention_bias": False},
        rules=_CORRECTION,
        fields=_ROUTED,
        constants={"sliding_window": None},
        read=_read_routed,
        write=_write_dots1,
    ),
    Architecture(
        "minimax-m2",
        "minimax_m2",
        has_head=True,
        rules=_CORRECTION,
        fields=_LOCAL,
        write=_write_minimax_m2,
    ),
    Architecture(
        "arctic",
        "arctic",
        names={
            "L.residual_layernorm": "B.ffn_norm",
            "L.post_attention_layernorm": "B.ffn_norm_exps",
        },
        rules=(
            *PAIRS,
            *build_module_rules(
                {f"L.residual_mlp.{part}_proj": f"B.ffn_{part}" for part in ("gate", "up", "down")}
            ),
        ),
        fields={**_LOCAL, **_NO_HEAD_DIM},
        constants={"moe_layer_frequency": 1, "parallel_attn_mlp_res": True, "sliding_window": None},
    ),
    Architecture(
        "ernie4_5-moe",
        "ernie4_5_moe",
        required={"use_bias": False, "moe_layer_interval": 1},
        rules=_CORRECTION,
        fields={
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            **_NO_HEAD_DIM,
        },
        present={"use_bias": ("blk.0.attn_q.bias",)},
        read=_read_ernie,
        write=_write_ernie,
        reshaped=lambda name, shape, _: shape[1:] if name.endswith("probs_b.bias") else shape,
    ),
    Architecture(
        "gpt-oss",
        "gpt_oss",
        has_head=True,
        rules=_SINKS,
        names={"L.post_attention_layernorm": "B.post_attention_norm"},
        fields={**_LOCAL, "sliding_window": "attention.sliding_window"},
        read=_read_alternating,
        write=_write_gpt_oss,
    ),
    Architecture(
        "phimoe",
        "phimoe",
        fields={**_LOCAL, **_NO_HEAD_DIM},
        constants={"sliding_window": None},
        present={
            "attention_bias": BIASES["attention_bias"],
            "lm_head_bias": ("output.bias",),
        },
        read=_read_phimoe,
        write=_write_phimoe,
    ),
)
