"""Dense decoders: the rows of architectures without experts and recurrent layers.

Facts are those of llama.cpp's `conversion` folder (which tensors a file has, and what the values
are) and of its `src/models` (which keys a model reads).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ed_models.checkpoints.gguf.architecture import (
    LAYER_NORM,
    Architecture,
    FileReading,
    FileWriting,
)
from ed_models.checkpoints.gguf.layouts import (
    JOINED_GATE,
    JOINED_QKV,
    NORMED_LAST,
    PAIRS,
    SANDWICH,
)
from ed_models.checkpoints.gguf.rope import read_rope

if TYPE_CHECKING:
    from ed_infra.config import EasyDeLBaseConfig

#: Biases of attention and of the feed-forward.
BIASES: Mapping[str, tuple[str, ...]] = {
    "attention_bias": ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"),
    "mlp_bias": ("blk.0.ffn_up.bias",),
}
_ATTENTION_BIAS = {"attention_bias": BIASES["attention_bias"]}
_NO_HEAD_DIM: Mapping[str, str | None] = {"head_dim": None}
_WINDOW: Mapping[str, str | None] = {"sliding_window": "attention.sliding_window"}
_NO_BIAS: Mapping[str, Any] = {"attention_bias": False}
_NO_WINDOW: Mapping[str, Any] = {"sliding_window": None}
_SOFT_CAPS: Mapping[str, str | None] = {
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
}
_MULTIPLIERS: Mapping[str, str | None] = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def _types(reading: FileReading) -> list[str] | None:
    """Return the types of layers by the pattern of windows; None without a pattern."""
    pattern = reading.array("attention.sliding_window_pattern")
    if not pattern:
        return None
    return ["sliding_attention" if window else "full_attention" for window in pattern]


def period(every: int) -> Any:
    """Return a reader of `layer_types` with full attention in each `every`-th layer."""

    def read(reading: FileReading) -> dict[str, Any]:
        count = reading.need("block_count")
        kinds = _types(reading) or [
            "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(count)
        ]
        return {"layer_types": kinds}

    return read


def write_pattern(writing: FileWriting) -> None:
    """Write which layers have a window."""
    kinds = getattr(writing.config, "layer_types", None)
    if kinds and "sliding_attention" in kinds:
        pattern = [kind == "sliding_attention" for kind in kinds]
        writing.set("attention.sliding_window_pattern", pattern)
    else:
        writing.metadata.pop(f"{writing.architecture}.attention.sliding_window", None)


def _layer_types(reading: FileReading) -> dict[str, Any]:
    kinds = _types(reading)
    return {"layer_types": kinds} if kinds else {}


def _read_parallel(reading: FileReading) -> dict[str, Any]:
    return {"use_parallel_residual": reading.get("use_parallel_residual", True)}


def _write_parallel(writing: FileWriting) -> None:
    writing.set("use_parallel_residual", bool(writing.config.use_parallel_residual))


def _read_stablelm(reading: FileReading) -> dict[str, Any]:
    return {"use_parallel_residual": not reading.has("blk.0.ffn_norm.weight")}


def _read_falcon(reading: FileReading) -> dict[str, Any]:
    heads, groups = reading.need("attention.head_count"), reading.get("attention.head_count_kv", 1)
    two = reading.has("blk.0.attn_norm_2.weight")
    return {
        "num_kv_heads": groups,
        "multi_query": groups == 1,
        "new_decoder_architecture": two or groups not in (1, heads),
        "num_ln_in_parallel_attn": 2 if two else 1,
        "parallel_attn": True,
        "alibi": False,
        "bias": reading.has("blk.0.attn_qkv.bias"),
        "ffn_hidden_size": reading.shape("blk.0.ffn_up.weight")[0],
    }


def _has_two_norms(config: EasyDeLBaseConfig) -> bool:
    return config.new_decoder_architecture and config.num_ln_in_parallel_attn != 1


def _write_falcon(writing: FileWriting) -> None:
    config = writing.config
    writing.set("attention.head_count_kv", config.num_key_value_heads)
    writing.set("feed_forward_length", config.ffn_hidden_size or 4 * config.hidden_size)
    writing.metadata["tensor_data_layout"] = "jploski"


def _read_phi3(reading: FileReading) -> dict[str, Any]:
    original = reading.get("rope.scaling.original_context_length")
    return {
        "sliding_window": reading.get("attention.sliding_window") or None,
        "original_max_position_embeddings": original or reading.need("context_length"),
    }


def _write_phi3(writing: FileWriting) -> None:
    config = writing.config
    writing.set("attention.sliding_window", config.sliding_window or 0)
    original = config.original_max_position_embeddings
    writing.set("rope.scaling.original_context_length", original)


def _read_gemma3(reading: FileReading) -> dict[str, Any]:
    settings: dict[str, Any] = period(6)(reading)
    size = reading.get("attention.key_length", 256)
    layers, heads = reading.need("block_count"), reading.need("attention.head_count")
    scalar = reading.need("embedding_length") // heads if layers == 62 else size  # llama.cpp: 27B
    global_rope = read_rope(reading, size)
    local = {"rope_type": "default", "rope_theta": reading.get("rope.freq_base_swa", 10_000.0)}
    rope = {"full_attention": global_rope, "sliding_attention": local}
    return {**settings, "query_pre_attn_scalar": scalar, "rope_parameters": rope}


def _write_gemma3(writing: FileWriting) -> None:
    write_pattern(writing)
    local = (writing.config.rope_parameters or {}).get("sliding_attention", {})
    writing.set("rope.freq_base_swa", float(local.get("rope_theta", 10_000.0)))


def _read_gemma2(reading: FileReading) -> dict[str, Any]:
    size, layers = reading.get("attention.key_length", 256), reading.need("block_count")
    heads = reading.need("attention.head_count")
    scalar = reading.need("embedding_length") // heads if layers == 46 else size  # llama.cpp: 27B
    return {"query_pre_attn_scalar": scalar, **period(2)(reading)}


def _read_granite(reading: FileReading) -> dict[str, Any]:
    size = reading.need("embedding_length") // reading.need("attention.head_count")
    return {} if reading.get("attention.scale") else {"attention_multiplier": size**-0.5}


def _read_smollm3(reading: FileReading) -> dict[str, Any]:
    count = reading.need("block_count")
    return {"no_rope_layers": [int((i + 1) % 4 != 0) for i in range(count)]}


def _read_rotary_pct(reading: FileReading) -> dict[str, Any]:
    size = reading.need("embedding_length") // reading.need("attention.head_count")
    rotated = reading.get("rope.dimension_count", size)
    return {"rotary_pct": rotated / size, **_read_parallel(reading)}


def _read_mpt(reading: FileReading) -> dict[str, Any]:
    bias = reading.get("attention.max_alibi_bias", 0.0)
    return {
        "attn_config": {
            "alibi": bias > 0,
            "alibi_bias_max": int(bias) or 8,
            "clip_qkv": reading.get("attention.clamp_kqv"),
        },
        "expansion_ratio": reading.need("feed_forward_length") // reading.need("embedding_length"),
    }


def _write_mpt(writing: FileWriting) -> None:
    attention = writing.config.attn_config
    writing.set("feed_forward_length", writing.config.expansion_ratio * writing.config.d_model)
    writing.set("attention.max_alibi_bias", float(attention.alibi_bias_max * attention.alibi))
    writing.set("attention.clamp_kqv", attention.clip_qkv)


def _write_inner(writing: FileWriting) -> None:
    """Write the size of a feed-forward that is four times the hidden size by default."""
    config = writing.config
    inner = getattr(config, "n_inner", None) or getattr(config, "intermediate_size", None)
    writing.set("feed_forward_length", inner or 4 * config.hidden_size)
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    writing.set("attention.head_count_kv", groups)
    context = getattr(config, "max_position_embeddings", None)
    writing.set("context_length", context or getattr(config, "seq_length", None) or 2048)


def _write_cohere(writing: FileWriting) -> None:
    config = writing.config
    if config.use_qk_norm and config.num_hidden_layers < 64:
        writing.unlike.append("use_qk_norm is True, which llama.cpp supports from 64 layers on")


def _write_heads(writing: FileWriting) -> None:
    config = writing.config
    size = config.hidden_size // config.num_attention_heads
    if (getattr(config, "head_dim", None) or size) != size:
        writing.unlike.append(f"head_dim is {config.head_dim}, and llama.cpp supports {size}")


def _read_exaone4(reading: FileReading) -> dict[str, Any]:
    count = reading.need("block_count")
    if count == 64:  # the only model with windows, for llama.cpp
        return period(4)(reading)
    return {"sliding_window": None, "layer_types": ["full_attention"] * count}


def _write_exaone4(writing: FileWriting) -> None:
    write_pattern(writing)
    config = writing.config
    if "sliding_attention" in (config.layer_types or ()) and config.num_hidden_layers != 64:
        writing.unlike.append("layer_types has windows, which llama.cpp supports for 64 layers")


def _has_temperature(reading: FileReading) -> bool:
    return bool(reading.get("attention.temperature_scale"))


def _read_ministral3(reading: FileReading) -> dict[str, Any]:
    rope = {
        "mscale": 1.0,  # llama.cpp assumes one
        "mscale_all_dim": reading.get("rope.scaling.yarn_log_multiplier"),
        "llama_4_scaling_beta": reading.get("attention.temperature_scale"),
    }
    return {"rope_parameters": {name: value for name, value in rope.items() if value is not None}}


def _write_ministral3(writing: FileWriting) -> None:
    rope = writing.config.rope_parameters
    writing.set("attention.temperature_scale", float(rope["llama_4_scaling_beta"]))
    if rope.get("mscale_all_dim") is not None:
        writing.set("rope.scaling.yarn_log_multiplier", float(rope["mscale_all_dim"]))


_LLAMA = Architecture("llama", "llama", rules=PAIRS, present=BIASES)

DECODER_ROWS: tuple[Architecture, ...] = (
    _LLAMA,
    Architecture("llama", "mistral", rules=PAIRS, constants=_NO_WINDOW, when=lambda _: False),
    Architecture(
        "mistral3",
        "ministral3",
        rules=PAIRS,
        constants=_NO_WINDOW,
        when=_has_temperature,
        read=_read_ministral3,
        write=_write_ministral3,
    ),
    Architecture("mistral3", "mistral", rules=PAIRS, constants=_NO_WINDOW),
    Architecture(
        "llama",
        "internlm3",
        rules=PAIRS,
        present={
            "qkv_bias": BIASES["attention_bias"],
            "bias": ("blk.0.attn_output.bias",),
        },
        when=lambda _: False,
    ),
    Architecture("qwen2", "qwen2", fields=_NO_HEAD_DIM),
    Architecture("qwen3", "qwen3", present=_ATTENTION_BIAS, required=_NO_BIAS),
    Architecture("gemma", "gemma", shifted=True),
    Architecture(
        "gemma2",
        "gemma2",
        names=SANDWICH,
        fields={**_WINDOW, **_SOFT_CAPS},
        shifted=True,
        read=_read_gemma2,
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        names=SANDWICH,
        fields={**_WINDOW, "final_logit_softcapping": "final_logit_softcapping"},
        shifted=True,
        read=_read_gemma3,
        write=_write_gemma3,
    ),
    Architecture(
        "phi2",
        "phi",
        has_head=True,
        fields={**LAYER_NORM, **_NO_HEAD_DIM},
    ),
    Architecture(
        "phi3",
        "phi3",
        required=_NO_WINDOW,
        rules=(*JOINED_QKV, *JOINED_GATE),
        fields={**_WINDOW, **_NO_HEAD_DIM},
        read=_read_phi3,
        write=_write_phi3,
    ),
    Architecture(
        "falcon",
        "falcon",
        rules=JOINED_QKV,
        names={"L.post_attention_layernorm": "B.attn_norm", "L.input_layernorm": "B.attn_norm_2"},
        fields={
            **LAYER_NORM,
            **_NO_HEAD_DIM,
            "layer_norm_eps": None,
            "layer_norm_epsilon": "attention.layer_norm_epsilon",
            "num_key_value_heads": None,
            "intermediate_size": None,
        },
        when=lambda reading: reading.has("blk.0.attn_norm_2.weight"),
        suits=lambda config: (
            config.num_ln_in_parallel_attn != 1 and config.new_decoder_architecture
        ),
        read=_read_falcon,
        required={"bias": False},
        write=_write_falcon,
    ),
    Architecture(
        "falcon",
        "falcon",
        rules=JOINED_QKV,
        fields={
            **LAYER_NORM,
            **_NO_HEAD_DIM,
            "layer_norm_eps": None,
            "layer_norm_epsilon": "attention.layer_norm_epsilon",
            "num_key_value_heads": None,
            "intermediate_size": None,
        },
        read=_read_falcon,
        required={"bias": False},
        write=_write_falcon,
    ),
    Architecture(
        "bloom",
        "bloom",
        rules=JOINED_QKV,
        names={"model.embed_norm": "token_embd_norm"},
        fields={
            "rms_norm_eps": None,
            "layer_norm_epsilon": "attention.layer_norm_epsilon",
            **_NO_HEAD_DIM,
            "num_key_value_heads": None,
            "max_position_embeddings": None,  # no field of BLOOM; `_write_inner` sets it
            "intermediate_size": None,
        },
        write=_write_inner,
        rotary=False,
    ),
    Architecture(
        "gpt2",
        "gpt2",
        rules=JOINED_QKV,
        names={"model.embed_positions": "position_embd"},
        fields={
            "rms_norm_eps": None,
            "layer_norm_epsilon": "attention.layer_norm_epsilon",
            **_NO_HEAD_DIM,
            "num_key_value_heads": None,
            "intermediate_size": None,
            "n_inner": "feed_forward_length",
        },
        write=_write_inner,
        rotary=False,
    ),
    Architecture(
        "gptneox",
        "gpt_neox",
        has_head=True,
        required={"attention_bias": True},
        rules=JOINED_QKV,
        fields={**LAYER_NORM, **_NO_HEAD_DIM, "num_key_value_heads": None},
        present={"attention_bias": ("blk.0.attn_qkv.bias",)},
        read=_read_rotary_pct,
        write=_write_parallel,
    ),
    Architecture(
        "mpt",
        "mpt",
        rules=JOINED_QKV,
        fields={
            "rms_norm_eps": None,
            "layer_norm_epsilon": "attention.layer_norm_epsilon",
            **_NO_HEAD_DIM,
            "num_key_value_heads": None,
            "intermediate_size": None,
            "max_position_embeddings": None,
            "max_seq_len": "context_length",
        },
        read=_read_mpt,
        write=_write_mpt,
        rotary=False,
    ),
    Architecture(
        "starcoder2",
        "starcoder2",
        required={"use_bias": True},
        fields={
            "rms_norm_eps": None,
            "norm_epsilon": "attention.layer_norm_epsilon",
            **_NO_HEAD_DIM,
        },
        present={"use_bias": ("blk.0.attn_output.bias",)},
    ),
    Architecture(
        "stablelm",
        "stablelm",
        has_head=True,
        fields={**LAYER_NORM, **_NO_HEAD_DIM},
        present={
            "use_qkv_bias": ("blk.0.attn_q.bias",),
            "qk_layernorm": ("blk.0.attn_q_norm.weight",),
        },
        read=_read_stablelm,
        write=_write_parallel,
    ),
    Architecture(
        "olmo",
        "olmo",
        rules=PAIRS,
        fields={
            "rms_norm_eps": None,
            "clip_qkv": "attention.clamp_kqv",
            **_NO_HEAD_DIM,
        },
        write=lambda writing: writing.set("attention.layer_norm_epsilon", 1e-5),
    ),
    Architecture(
        "olmo2",
        "olmo3",
        has_head=True,
        names=NORMED_LAST,
        fields={**_WINDOW, **_NO_HEAD_DIM},
        when=lambda reading: bool(reading.get("attention.sliding_window")),
        read=_layer_types,
        write=write_pattern,
    ),
    Architecture("olmo2", "olmo2", names=NORMED_LAST, fields=_NO_HEAD_DIM, has_head=True),
    Architecture(
        "granite",
        "granite",
        rules=PAIRS,
        fields={**_MULTIPLIERS, **_NO_HEAD_DIM},
        present=BIASES,
        read=_read_granite,
    ),
    Architecture(
        "command-r",
        "cohere",
        required=_NO_BIAS,
        write=_write_cohere,
        fields={**LAYER_NORM, **_NO_HEAD_DIM, "logit_scale": "logit_scale"},
        present={**_ATTENTION_BIAS, "use_qk_norm": ("blk.0.attn_q_norm.weight",)},
    ),
    Architecture(
        "cohere2",
        "cohere2",
        fields={**LAYER_NORM, **_WINDOW, **_NO_HEAD_DIM, "logit_scale": "logit_scale"},
        read=period(4),
        write=_write_heads,
    ),
    Architecture(
        "glm4",
        "glm4",
        rules=JOINED_GATE,
        names=SANDWICH,
        present=_ATTENTION_BIAS,
    ),
    Architecture(
        "chatglm",
        "glm",
        rules=JOINED_GATE,
        present=_ATTENTION_BIAS,
        write=_write_heads,
    ),
    Architecture(
        "exaone",
        "exaone",
        fields={
            "num_hidden_layers": None,
            "num_layers": "block_count",
            "rms_norm_eps": None,
            "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
        },
        write=_write_inner,
    ),
    Architecture(
        "exaone4",
        "exaone4",
        names=NORMED_LAST,
        fields={**_WINDOW},
        read=_read_exaone4,
        write=_write_exaone4,
    ),
    Architecture(
        "internlm2",
        "internlm2",
        has_head=True,
        rules=PAIRS,
        required={"bias": False},
        fields=_NO_HEAD_DIM,
        present={"bias": BIASES["attention_bias"]},
    ),
    Architecture(
        "nemotron",
        "nemotron",
        has_head=True,
        fields={"rms_norm_eps": None, "norm_eps": "attention.layer_norm_epsilon"},
        present=BIASES,
        shifted=True,
        write=_write_heads,
    ),
    Architecture(
        "smollm3",
        "smollm3",
        required={**_NO_BIAS, "mlp_bias": False},
        rules=PAIRS,
        fields=_NO_HEAD_DIM,
        present=BIASES,
        read=_read_smollm3,
    ),
    Architecture(
        "ernie4_5",
        "ernie4_5",
        present={"use_bias": ("blk.0.attn_q.bias",)},
        required={"use_bias": False},
    ),
    Architecture(
        "seed_oss",
        "seed_oss",
        required={"mlp_bias": False, "attention_out_bias": False},
        names={"L.post_attention_layernorm": "B.post_attention_norm"},
        present={**BIASES, "attention_out_bias": ("blk.0.attn_output.bias",)},
    ),
    Architecture(
        "hunyuan-dense",
        "hunyuan_v1_dense",
        present=_ATTENTION_BIAS,
        required=_NO_BIAS,
    ),
)
