"""EasyLM's configuration of LLaMA as fields of this project: architecture, and execution."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ed_infra.errors import ConfigError, unknown_name

from ed_elarge.easylm.flags import LLAMA_FLAGS, Flag, FlagValues

# Hidden size, intermediate size, layers, heads, heads of keys and values, positions, epsilon,
# tokens, and base of the rotation.
_SIZES: dict[str, tuple[float, ...]] = {
    "debug": (128, 256, 2, 4, 4, 2048, 1e-6, 32000, 1e4),
    "1b": (2048, 5504, 22, 16, 16, 2048, 1e-6, 32000, 1e4),
    "3b": (3200, 8640, 26, 32, 32, 2048, 1e-6, 32000, 1e4),
    "7b": (4096, 11008, 32, 32, 32, 2048, 1e-6, 32000, 1e4),
    "13b": (5120, 13824, 40, 40, 40, 2048, 1e-6, 32000, 1e4),
    "30b": (6656, 17920, 60, 52, 52, 2048, 1e-6, 32000, 1e4),
    "65b": (8192, 22016, 80, 64, 64, 2048, 1e-5, 32000, 1e4),
    "llama2_7b": (4096, 11008, 32, 32, 32, 4096, 1e-5, 32000, 1e4),
    "llama2_13b": (5120, 13824, 40, 40, 40, 4096, 1e-5, 32000, 1e4),
    "llama2_70b": (8192, 28672, 80, 64, 8, 4096, 1e-5, 32000, 1e4),
    "llama3_8b": (4096, 14336, 32, 32, 8, 8192, 1e-5, 128256, 5e5),
    "llama3_70b": (8192, 28672, 80, 64, 8, 8192, 1e-5, 128256, 5e5),
}
_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_sequence_length",
    "rms_norm_eps",
    "vocab_size",
    "rope_theta",
)
#: Name of a size -> the fields that differ from EasyLM's defaults; `llama_7b` is `7b`.
_STANDARD: dict[str, dict[str, Any]] = {
    name: {
        field: value if field in ("rms_norm_eps", "rope_theta") else int(value)
        for field, value in zip(_FIELDS, sizes, strict=True)
    }
    for name, sizes in _SIZES.items()
}
#: Field of EasyLM -> field of Hugging Face, for architecture.
_ARCHITECTURE = {
    **{name: name for name, entry in LLAMA_FLAGS.items() if not isinstance(entry, Flag)},
    "max_sequence_length": "max_position_embeddings",
    "attn_pdrop": "attention_dropout",
}
#: Fields of EasyLM about the execution, which `config.json` does not contain.
_EXECUTION = re.compile("remat_|scan_|fcm_")


def read_fields(flags: FlagValues) -> dict[str, Any] | None:
    """Return the fields of EasyLM's configuration that the flags describe; None: no flag does.

    Raises:
        ConfigError: A flag names no configuration, or a field is unknown.
    """
    address = flags["load_llama_config"]
    flag_fields = {
        name.removeprefix("llama."): flags[name]
        for name in flags.explicit_names
        if name.startswith("llama.") and name in flags
    }
    named = flag_fields.pop("base_model", "") or address
    updates = _parse_dictionary(flags.get("update_llama_config", ""))
    if not (named or flag_fields or updates):
        return None
    return {**(_load(named) if named else {}), **flag_fields, **updates}


def _load(address: str) -> dict[str, Any]:
    name = address.lower()
    for size in (name, name.removeprefix("llama_")):
        if size in _STANDARD:
            return dict(_STANDARD[size])
    kind, mark, path = address.partition("::")
    if kind == "pickle" and mark:
        raise ConfigError(
            f"{address}: pickled files are not read, because they execute code. Write the fields "
            "to a JSON file, and pass json::FILE"
        )
    if kind != "json" or not mark:
        raise unknown_name("load_llama_config", address, [*_STANDARD, "json::FILE"])
    try:
        fields = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} contains a {type(fields).__name__}; a configuration is a map")
    spellings = {
        "max_position_embeddings": "max_sequence_length",
        "attention_dropout": "attn_pdrop",
    }
    renamed = {spellings.get(name, name): value for name, value in fields.items()}
    return {name: value for name, value in renamed.items() if name in LLAMA_FLAGS}


def _parse_dictionary(text: str) -> dict[str, Any]:
    """Return the dictionary of a Python literal, `{"a": 1}` or `dict(a=1)`, without executing."""
    if not text:
        return {}
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and not node.args:
            value = {str(one.arg): ast.literal_eval(one.value) for one in node.keywords}
        else:
            value = ast.literal_eval(node)
        if not isinstance(value, dict):
            raise ValueError(f"it is a {type(value).__name__}")
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"--update_llama_config={text} is no dictionary of Python values ({error}): write "
            "'{\"max_sequence_length\": 4096}'"
        ) from error
    for name in value:
        if name not in LLAMA_FLAGS:
            raise unknown_name("field of update_llama_config", name, LLAMA_FLAGS)
    return value


def get_llama_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `config.json` of EasyLM's fields, with EasyLM's defaults."""
    all_fields = {**LLAMA_FLAGS, **fields}
    if not all_fields["num_key_value_heads"]:
        all_fields["num_key_value_heads"] = all_fields["num_attention_heads"]
    out: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    for name, field in _ARCHITECTURE.items():
        if not _EXECUTION.match(name):
            out[field] = all_fields[name]
    return out


def execution(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base_config.values` of EasyLM's fields: recomputation, blocks, forgetful masks.

    Raises:
        ConfigError: A field has a value that this project cannot serve.
    """
    for name, value in fields.items():
        entry = LLAMA_FLAGS[name]
        if isinstance(entry, Flag) and entry.refused and value != entry.default:
            raise ConfigError(
                f"{name}={value!r}: only {entry.default!r} is possible here; {entry.reason}"
            )
    all_fields = {**LLAMA_FLAGS, **fields}
    out: dict[str, Any] = {"gradient_checkpointing": all_fields["remat_block"]}
    if all_fields["scan_attention"]:
        out["attn_mechanism"] = "blockwise"
        out["blocksize_q"] = all_fields["scan_query_chunk_size"]
        out["blocksize_k"] = all_fields["scan_key_chunk_size"]
    if all_fields["scan_mlp"]:
        out |= {"use_scan_mlp": True, "scan_mlp_chunk_size": all_fields["scan_mlp_chunk_size"]}
    if all_fields["fcm_max_ratio"]:
        out |= {name: all_fields[name] for name in ("fcm_min_ratio", "fcm_max_ratio")}
    return out
