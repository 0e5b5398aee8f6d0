"""Recurrent models, encoders and encoder-decoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ed_models.checkpoints.gguf.architecture import Architecture, FileReading, FileWriting
from ed_models.checkpoints.gguf.layouts import (
    BLOCK,
    CONVOLUTION,
    LAYER,
    build_fused_rules,
    build_module_rules,
    values,
)
from ed_models.weights.rules import Rule, equal, split

if TYPE_CHECKING:
    from ed_infra.config import EasyDeLBaseConfig

_NONE: Mapping[str, str | None] = dict.fromkeys(
    (
        "max_position_embeddings",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
    )
)
_STATE: Mapping[str, str | None] = {
    **_NONE,
    "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
    "conv_kernel": "ssm.conv_kernel",
    "state_size": "ssm.state_size",
}
_MIXER = "L.mixer"
_MAMBA = (
    *build_fused_rules(_MIXER, ("in_proj", "z_proj"), "B.ssm_in"),
    Rule(f"{LAYER}.mixer.conv1d.kernel", f"{BLOCK}.ssm_conv1d.weight", CONVOLUTION),
    *values(
        {
            "L.mixer.conv1d.bias": "B.ssm_conv1d.bias",
            "L.mixer.A_log": "B.ssm_a",
            "L.mixer.D": "B.ssm_d",
        }
    ),
    *build_module_rules(
        {
            "L.norm": "B.attn_norm",
            "L.mixer.x_proj": "B.ssm_x",
            "L.mixer.dt_proj": "B.ssm_dt",
            "L.mixer.out_proj": "B.ssm_out",
        }
    ),
)
_MAMBA2 = (
    *build_fused_rules(_MIXER, ("z_proj", "in_proj", "bc_proj", "dt_proj"), "B.ssm_in"),
    Rule(
        tuple(f"{LAYER}.mixer.{name}.kernel" for name in ("conv1d", "bc_conv1d")),
        f"{BLOCK}.ssm_conv1d.weight",
        split(0, CONVOLUTION),
    ),
    Rule(
        tuple(f"{LAYER}.mixer.{name}.bias" for name in ("conv1d", "bc_conv1d")),
        f"{BLOCK}.ssm_conv1d.bias",
        split(0, equal),
    ),
    *values(
        {
            "L.mixer.dt_bias": "B.ssm_dt.bias",
            "L.mixer.A_log": "B.ssm_a",
            "L.mixer.D": "B.ssm_d",
        }
    ),
    *build_module_rules(
        {
            "L.mixer.norm": "B.ssm_norm",  # in front: a pattern for a layer also matches a path
            "L.norm": "B.attn_norm",
            "L.mixer.out_proj": "B.ssm_out",
        }
    ),
)

_SHORT_CONVOLUTION = (
    *build_fused_rules("L.conv", ("b_proj", "c_proj", "x_proj"), "B.shortconv.in_proj"),
    Rule(f"{LAYER}.conv.conv1d.kernel", f"{BLOCK}.shortconv.conv.weight", CONVOLUTION),
)


def _read_lfm2(reading: FileReading) -> dict[str, Any]:
    groups = reading.array("attention.head_count_kv")
    return {
        "num_key_value_heads": max(groups, default=0),
        "layer_types": ["full_attention" if count else "conv" for count in groups],
        "block_auto_adjust_ff_dim": False,
    }


def _write_lfm2(writing: FileWriting) -> None:
    config = writing.config
    groups = config.num_key_value_heads
    counts = [groups if kind == "full_attention" else 0 for kind in config.layer_types]
    writing.set("attention.head_count_kv", counts)
    writing.set("feed_forward_length", config.feed_forward_size)


def _convolution_shape(
    name: str, shape: tuple[int, ...], config: EasyDeLBaseConfig
) -> tuple[int, ...]:
    return (shape[0], shape[2]) if name.endswith("shortconv.conv.weight") else shape


def _mamba_shape(name: str, shape: tuple[int, ...], config: EasyDeLBaseConfig) -> tuple[int, ...]:
    """Convolutions are [channels, width]; numbers of a head of Mamba-2 are columns."""
    if name.endswith("ssm_conv1d.weight"):
        return shape[0], shape[2]
    if name.endswith((".ssm_a", ".ssm_d")) and hasattr(config, "n_groups"):
        return (*shape, 1)
    if name.endswith(".ssm_norm.weight"):
        return config.n_groups, shape[0] // config.n_groups
    return shape


def _read_mamba(reading: FileReading) -> dict[str, Any]:
    inner, width = reading.need("ssm.inner_size"), reading.need("embedding_length")
    return {
        "expand": inner // width,
        "intermediate_size": inner,
        "time_step_rank": reading.need("ssm.time_step_rank"),
    }


def _write_mamba(writing: FileWriting) -> None:
    _write_state(writing)
    writing.set("ssm.inner_size", writing.config.intermediate_size)
    writing.set("ssm.time_step_rank", writing.config.time_step_rank)
    eps = getattr(writing.config, "mixer_rms_eps", None)
    writing.set("ssm.dt_b_c_rms", eps is not None)
    if eps is not None and eps > 1e-4:
        writing.unlike.append(f"mixer_rms_eps is {eps}, and llama.cpp uses layer_norm_epsilon")


def _read_mamba2(reading: FileReading) -> dict[str, Any]:
    inner, heads = reading.need("ssm.inner_size"), reading.need("ssm.time_step_rank")
    return {
        "expand": inner // reading.need("embedding_length"),
        "num_heads": heads,
        "head_dim": inner // heads,
        "n_groups": reading.need("ssm.group_count"),
    }


def _write_mamba2(writing: FileWriting) -> None:
    config = writing.config
    _write_state(writing)
    writing.set("ssm.inner_size", config.num_heads * config.head_dim)
    writing.set("ssm.time_step_rank", config.num_heads)
    writing.set("ssm.group_count", config.n_groups)


def _write_state(writing: FileWriting) -> None:
    """Write values that llama.cpp requires and does not use."""
    writing.set("context_length", 2**20)
    writing.set("feed_forward_length", 0)
    writing.set("attention.head_count", 0)


_SIDES = (("encoder", "enc"), ("decoder", "dec"))
_T5_NAMES: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_o",
    "cross_attention_layernorm": "cross_attn_norm",
    "cross_attn.q_proj": "cross_attn_q",
    "cross_attn.k_proj": "cross_attn_k",
    "cross_attn.v_proj": "cross_attn_v",
    "cross_attn.o_proj": "cross_attn_o",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_T5 = tuple(
    rule
    for side, short in _SIDES
    for rule in (
        *build_module_rules(
            {
                f"model.{side}.layers.{{i}}.{ours}": f"{short}.blk.{{i}}.{theirs}"
                for ours, theirs in _T5_NAMES.items()
            }
        ),
        *build_module_rules({f"model.{side}.norm": f"{short}.output_norm"}),
        *values({f"model.{side}.relative_attention_bias": f"{short}.blk.0.attn_rel_b.weight"}),
        *values(
            {
                f"model.{side}.layers.{{i}}.self_attn.relative_attention_bias": (
                    f"{short}.blk.{{i}}.attn_rel_b.weight"
                )
            }
        ),
    )
)


def _is_umt5(reading: FileReading) -> bool:
    return reading.has("enc.blk.1.attn_rel_b.weight")


def _read_t5(reading: FileReading) -> dict[str, Any]:
    gated = reading.has("enc.blk.0.ffn_gate.weight")
    layers = reading.need("block_count")
    return {
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "num_decoder_layers": reading.get("decoder_block_count", layers),
        "decoder_start_token_id": reading.get("decoder_start_token_id", 0),
        "is_encoder_decoder": True,
        "architectures": ["T5ForConditionalGeneration"],
    }


def _write_t5(writing: FileWriting) -> None:
    config = writing.config
    writing.set("context_length", 512)
    writing.set("attention.layer_norm_rms_epsilon", config.layer_norm_epsilon)
    writing.set("attention.value_length", config.d_kv)
    writing.set("decoder_block_count", config.num_decoder_layers or config.num_layers)
    writing.set("decoder_start_token_id", getattr(config, "decoder_start_token_id", None) or 0)


_T5_FIELDS: Mapping[str, str | None] = {
    **_NONE,
    "num_hidden_layers": None,
    "hidden_size": None,
    "d_model": "embedding_length",
    "d_ff": "feed_forward_length",
    "d_kv": "attention.key_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "relative_attention_num_buckets": "attention.relative_buckets_count",
}
_ENCODER: Mapping[str, str] = {
    "model.embed_types": "token_types",
    "model.embed_positions": "position_embd",
    "model.embed_norm": "token_embd_norm",
    "L.input_layernorm": "B.attn_output_norm",
    "L.post_attention_layernorm": "B.layer_output_norm",
}
_ENCODER_FIELDS: Mapping[str, str | None] = {
    "rms_norm_eps": None,
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "num_key_value_heads": None,
    "head_dim": None,
}


def _read_encoder(reading: FileReading) -> dict[str, Any]:
    """An encoder without its head for masked tokens, which llama.cpp does not store."""
    types = "token_types.weight"
    return {
        "type_vocab_size": reading.shape(types)[0] if reading.has(types) else 0,
        "tie_word_embeddings": True,
    }


def _write_encoder(writing: FileWriting) -> None:
    writing.set("attention.causal", False)
    writing.metadata["tokenizer.ggml.token_type_count"] = writing.config.type_vocab_size


OTHER_ROWS: tuple[Architecture, ...] = (
    Architecture(
        "mamba",
        "falcon_mamba",
        rules=_MAMBA,
        fields={**_STATE, "mixer_rms_eps": "ssm.dt_b_c_rms_eps"},  # a key that llama.cpp ignores
        when=lambda reading: bool(reading.get("ssm.dt_b_c_rms", False)),
        read=_read_mamba,
        write=_write_mamba,
        rotary=False,
        reshaped=_mamba_shape,
    ),
    Architecture(
        "mamba",
        "mamba",
        rules=_MAMBA,
        fields=_STATE,
        read=_read_mamba,
        write=_write_mamba,
        rotary=False,
        reshaped=_mamba_shape,
    ),
    Architecture(
        "mamba2",
        "mamba2",
        rules=_MAMBA2,
        fields=_STATE,
        read=_read_mamba2,
        write=_write_mamba2,
        rotary=False,
        reshaped=_mamba_shape,
    ),
    Architecture(
        "lfm2",
        "lfm2",
        names={"model.norm": "token_embd_norm", "L.conv.out_proj": "B.shortconv.out_proj"},
        rules=_SHORT_CONVOLUTION,
        fields={
            "rms_norm_eps": None,
            "norm_eps": "attention.layer_norm_rms_epsilon",
            "num_key_value_heads": None,
            "head_dim": None,
            "conv_L_cache": "shortconv.l_cache",
        },
        required={"conv_bias": False},
        read=_read_lfm2,
        write=_write_lfm2,
        reshaped=_convolution_shape,
    ),
    Architecture(
        "t5",
        "umt5",
        rules=_T5,
        fields=_T5_FIELDS,
        when=_is_umt5,
        read=lambda reading: {
            **_read_t5(reading),
            "architectures": ["UMT5ForConditionalGeneration"],
        },
        write=_write_t5,
        rotary=False,
    ),
    Architecture(
        "t5",
        "t5",
        rules=_T5,
        fields=_T5_FIELDS,
        read=_read_t5,
        write=_write_t5,
        rotary=False,
    ),
    Architecture(
        "bert",
        "bert",
        names=_ENCODER,
        fields=_ENCODER_FIELDS,
        constants={"architectures": ["BertModel"]},
        read=_read_encoder,
        write=_write_encoder,
        rotary=False,
    ),
    Architecture(
        "nomic-bert",
        "nomic_bert",
        names=_ENCODER,
        rules=build_fused_rules("L.self_attn", ("q_proj", "k_proj", "v_proj"), "B.attn_qkv"),
        fields=_ENCODER_FIELDS,
        constants={"architectures": ["NomicBertModel"]},
        read=_read_encoder,
        write=_write_encoder,
    ),
)
