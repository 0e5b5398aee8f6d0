"""config.json of the model in a GGUF file, and the metadata of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from ed_infra.errors import CheckpointError

from ed_models.checkpoints.gguf.architecture import Architecture, FileReading, FileWriting
from ed_models.checkpoints.gguf.header import GgufHeader
from ed_models.checkpoints.gguf.rope import read_rope, write_rope
from ed_models.checkpoints.gguf.table import row_of_file

if TYPE_CHECKING:
    from ed_infra.config import EasyDeLBaseConfig

#: Field of a configuration -> key of a token id.
TOKEN_ID_KEYS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


def build_settings(
    header: GgufHeader,
    values: Callable[[str], np.ndarray] | None = None,
    row: Architecture | None = None,
) -> dict[str, Any]:
    """Return the content of config.json for the model in a file.

    Args:
        header: the content of the file.
        values: returns the values of a small tensor; None reads the file.
        row: the row of the architecture; None is the first one that matches the file.

    Raises:
        CheckpointError: the architecture is not supported, or the metadata is incomplete.
    """
    file_row, reading = row_of_file(header, values)
    row = file_row if row is None else row
    layers = reading.get("block_count")
    if not isinstance(layers, int) or not 0 < layers <= len(header.tensors):
        raise CheckpointError(
            f"{header.file}: block_count is {layers!r}, and the file has {len(header.tensors)} "
            "tensors: the file is damaged"
        )
    settings: dict[str, Any] = {"model_type": row.model_type}
    for name, key in row.keys.items():
        value = reading.get(key)
        if value is not None:
            settings[name] = value
    settings["vocab_size"] = reading.shape(EMBEDDING)[0]
    settings["tie_word_embeddings"] = not reading.has(HEAD)
    settings |= {name: reading.has(*tensors) for name, tensors in row.present.items()}
    for name, key in TOKEN_ID_KEYS.items():
        if isinstance(token := header.metadata.get(key), int):
            settings[name] = token
    if row.rotary:
        size = _head_dim(reading)
        settings["rope_parameters"] = read_rope(reading, size)
        if "head_dim" not in row.keys and not reading.get("attention.key_length_mla"):
            by_default = reading.need("embedding_length") // reading.need("attention.head_count")
            settings |= {"head_dim": size} if size != by_default else {}
    settings["dtype"] = _dtype(header)
    settings |= row.constants
    extra_settings = dict(row.read(reading))
    rope = extra_settings.pop("rope_parameters", {})
    settings |= extra_settings
    if "full_attention" in rope:
        settings["rope_parameters"] = rope
    elif rope:
        settings["rope_parameters"] |= rope
    return settings


def _dtype(header: GgufHeader) -> str:
    """Return the dtype that represents the matrices: bfloat16 for quantized ones."""
    form = header.tensors[EMBEDDING].format
    return {"F32": "float32", "F16": "float16"}.get(form, "bfloat16")


def _head_dim(reading: FileReading) -> int:
    mla = reading.get("attention.key_length_mla")
    size = reading.get("attention.key_length")
    if mla:
        return reading.need("rope.dimension_count")
    return size or reading.need("embedding_length") // reading.need("attention.head_count")


def write_settings(config: EasyDeLBaseConfig, row: Architecture) -> FileWriting:
    """Return the metadata and the additional tensors of a configuration.

    Raises:
        CheckpointError: llama.cpp cannot represent a value.
    """
    writing = FileWriting(config, row.name)
    for name, key in row.keys.items():
        value = getattr(config, name, None)
        if isinstance(value, list | tuple):
            raise CheckpointError(
                f"{name} of the configuration is {value!r}, and a GGUF file of the architecture "
                f"{row.name!r} has one number"
            )
        writing.set(key, value)
    writing.set("vocab_size", config.vocab_size)
    for name, key in TOKEN_ID_KEYS.items():
        token = getattr(config, name, None)
        token = token[0] if isinstance(token, list) and token else token
        if isinstance(token, int) and token >= 0:
            writing.metadata[key] = token
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads if row.rotary else None
    )
    if row.rotary and head_dim:
        writing.set("attention.key_length", head_dim)
        writing.set("attention.value_length", head_dim)
    if row.rotary and head_dim:
        rope = getattr(config, "rope_parameters", None) or {}
        rope = rope.get("full_attention", rope)
        write_rope(writing, rope, head_dim)
    row.write(writing)
    return writing
