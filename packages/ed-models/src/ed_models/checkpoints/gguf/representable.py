"""Whether a GGUF file represents a configuration: llama.cpp must compute the same numbers.

A file has fewer values than a configuration. A value that a file lacks is the one that llama.cpp
assumes, so a model with another value is not written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ed_infra.config import EasyDeLBaseConfig
from ed_infra.config.fields import FIELDS
from ed_infra.errors import CheckpointError

from ed_models.checkpoints.gguf.architecture import Architecture, FileWriting
from ed_models.checkpoints.gguf.header import GgufHeader
from ed_models.checkpoints.gguf.rope import llama3_divisors, longrope_factor
from ed_models.checkpoints.gguf.settings import build_settings

#: Fields without an effect on the numbers of a model.
_WITHOUT_EFFECT = frozenset(
    {
        *("architectures", "dtype", "name_or_path", "transformers_version", "_name_or_path"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "eod_token_id", "decoder_start_token_id"),
        *("use_cache", "pretraining_tp", "chunk_size", "keys_to_ignore_at_inference"),
        *("max_window_layers", "use_sliding_window", "sliding_window_pattern", "block_types"),
        *("initializer_factor", "output_router_logits", "scale_attn_weights", "seq_length"),
        *("num_mtp_layers", "num_nextn_predict_layers", "aux_loss_alpha", "seq_aux", "ep_size"),
        *("residual_in_fp32", "rescale_prenorm_residual", "use_mambapy", "time_step_init_scheme"),
        *(
            "use_associative_scan",
            "time_step_scale",
            "no_rope_layer_interval",
            "classifier_dropout",
        ),
        *("problem_type", "id2label", "label2id", "num_labels", "reorder_and_upcast_attn"),
        *("moe_layer_end_index", "moe_norm_min", "num_ln_in_parallel_attn", "summary_type"),
        *(
            "tie_word_embeddings",
            "is_decoder",
            "add_cross_attention",
            "original_max_position_embeddings",
        ),
        *("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"),
        *("full_attn_idxs",),  # `layer_types` of LFM2
        *("tie_encoder_decoder", "position_embedding_type", "quantization_config", "head_type"),
    }
)
#: Endings and beginnings of such names.
_ENDINGS = ("dropout", "_pdrop", "dropout_prob", "initializer_range", "_coef", "jitter_noise")
_BEGINNINGS = ("summary_", "time_step_m", "time_step_floor", "initializer_")


def check_represented(
    config: EasyDeLBaseConfig,
    row: Architecture,
    header: GgufHeader,
    writing: FileWriting,
) -> None:
    """Check that the model of a new file is that of the configuration.

    Args:
        config: the configuration of the model.
        row: the architecture by which it is written.
        header: the header of the file.
        writing: the metadata, and the tensors that are no parameters.

    Raises:
        CheckpointError: a value of the configuration is not in the file.
    """
    stored = type(config).from_dict(build_settings(header, writing.tensors.__getitem__, row))
    model_values = _collect_values(config)
    read = _collect_values(stored)
    differing = [
        f"{name} is {model_values.get(name)!r}, and a file represents {read.get(name)!r}"
        for name in sorted(read)  # other names are attributes that the model does not read
        if not _equal(model_values.get(name), read.get(name))
    ]
    differing += writing.unlike
    differing += [
        f"{name} is {value!r}, and llama.cpp supports {supported!r}"
        for name, supported in row.required.items()
        for value in [getattr(config, name, None)]
        if not _equal(value, supported)
    ]
    if differing:
        raise CheckpointError(
            f"llama.cpp would compute other numbers for this {config.model_type} model: "
            f"{'; '.join(differing)}. Use save_pretrained, or change the configuration if the "
            "value has no effect on your texts"
        )


def _collect_values(config: EasyDeLBaseConfig) -> dict[str, Any]:
    values = {
        name: value
        for name, value in config.to_dict().items()
        if name not in _WITHOUT_EFFECT | FIELDS.keys()
        and not name.endswith(_ENDINGS)
        and not name.startswith(_BEGINNINGS)
    }
    heads = getattr(config, "num_attention_heads", None)
    if values.get("head_dim") is None and heads:
        values["head_dim"] = config.hidden_size // heads
    if values.get("n_inner", 0) is None:
        values["n_inner"] = 4 * config.hidden_size
    size = getattr(config, "feed_forward_size", None)
    if size is not None:  # LFM2 derives the size from several fields
        values["intermediate_size"] = size
    if "new_decoder_architecture" in values:  # Falcon reads one of the two
        unread = "multi_query" if values["new_decoder_architecture"] else "num_kv_heads"
        values.pop(unread, None)
    rope = values.get("rope_parameters")
    if isinstance(rope, Mapping):
        context = getattr(config, "max_position_embeddings", None)
        size = values.get("head_dim") or 0
        nested = {n: _rope(r, context, size) for n, r in rope.items() if isinstance(r, Mapping)}
        values["rope_parameters"] = nested or _rope(rope, context, size)
    return values


def _rope(rope: Mapping[str, Any], context: int | None, head_dim: int) -> dict[str, Any]:
    """Return parameters of positions with the values that are assumed for absent ones.

    Two descriptions of the same divisors of frequencies are equal.
    """
    kind = rope.get("rope_type", "default")
    full: dict[str, Any] = {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0, **rope}
    original = full.get("original_max_position_embeddings")
    if kind == "yarn":
        full = {"beta_fast": 32.0, "beta_slow": 1.0, **full}
        full["original_max_position_embeddings"] = original or context
    if kind == "longrope" and context:
        full.pop("factor", None)
        full["attention_factor"] = full.get("attention_factor") or longrope_factor(
            context, original
        )
    if full.get("partial_rotary_factor") is None:
        full["partial_rotary_factor"] = 1.0
    divisors = full.get("short_factor")
    if kind == "llama3":
        divisors = llama3_divisors(full, int(head_dim * full["partial_rotary_factor"])).tolist()
    elif kind != "longrope" or divisors != full.get("long_factor") or full["attention_factor"] != 1:
        return full
    return {
        "rope_theta": full["rope_theta"],
        "partial_rotary_factor": full["partial_rotary_factor"],
        "divisors": divisors,
    }


def _equal(model_value: object, read: object) -> bool:
    if isinstance(model_value, Mapping) and isinstance(read, Mapping):
        names = (model_value.keys() | read.keys()) - {"type", "max_position_embeddings"}
        return all(_equal(model_value.get(name), read.get(name)) for name in names)
    if (
        isinstance(model_value, bool)
        or isinstance(read, bool)
        or model_value is None
        or read is None
    ):
        return model_value == read or not (model_value or read)
    if isinstance(model_value, int | float) and isinstance(read, int | float):
        return math.isclose(model_value, read, rel_tol=1e-6, abs_tol=1e-12)
    if isinstance(model_value, list | tuple) and isinstance(read, list | tuple):
        return len(model_value) == len(read) and all(map(_equal, model_value, read))
    return model_value == read
