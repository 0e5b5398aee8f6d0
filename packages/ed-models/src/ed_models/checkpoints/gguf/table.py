"""The table of architectures, and the row of a file or a model type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from ed_infra.errors import CheckpointError, did_you_mean

from ed_models.checkpoints.gguf import decoders, experts, others
from ed_models.checkpoints.gguf.architecture import Architecture, FileReading
from ed_models.checkpoints.gguf.header import GgufHeader, get_text_value
from ed_models.checkpoints.gguf.layouts import JOINED_EXPERTS, JOINED_LATENT, JOINED_QKV
from ed_models.weights.rules import Rule

if TYPE_CHECKING:
    from ed_infra.config import EasyDeLBaseConfig

#: Rows with conditions are in front of those of the same name without.
ARCHITECTURES: tuple[Architecture, ...] = (
    *experts.EXPERT_ROWS,
    *decoders.DECODER_ROWS,
    *others.OTHER_ROWS,
)
#: Tensors of several parameters, which some versions of llama.cpp write and others do not.
_JOINED: Sequence[tuple[str, Sequence[Rule]]] = (
    (".attn_qkv.weight", JOINED_QKV),
    (".ffn_gate_up_exps.weight", JOINED_EXPERTS),
    (".attn_kv_b.weight", JOINED_LATENT),
)


def row_of_file(
    header: GgufHeader, values: Callable[[str], np.ndarray] | None = None
) -> tuple[Architecture, FileReading]:
    """Return the row of a file.

    Args:
        header: the content of the file.
        values: returns the values of a small tensor; None reads the file.

    Raises:
        CheckpointError: the architecture is not supported.
    """
    name = get_text_value(header.metadata, "general.architecture")
    if name is None:
        raise CheckpointError(f"{header.file} has no general.architecture, so it holds no model")
    reading = FileReading(header, name, values)
    for row in ARCHITECTURES:
        if row.name == name and row.when(reading):
            return row, reading
    architectures = sorted({row.name for row in ARCHITECTURES})
    raise CheckpointError(
        f"{header.file} has the architecture {name!r}, which is not read"
        f"{did_you_mean(name, architectures)} (known: {', '.join(architectures)}): use the "
        "checkpoint in Hugging "
        "Face layout"
    )


def row_of_model(config: EasyDeLBaseConfig) -> Architecture:
    """Return the row by which the model of a configuration is written.

    Raises:
        CheckpointError: llama.cpp has no such model.
    """
    model_type = config.model_type
    for row in ARCHITECTURES:
        if row.model_type == model_type and row.suits(config):
            return row
    model_types = sorted({row.model_type for row in ARCHITECTURES})
    raise CheckpointError(
        f"models of type {model_type!r} are not written as GGUF files"
        f"{did_you_mean(model_type, model_types)} (known: {', '.join(model_types)}): use "
        "save_pretrained"
    )


def rules_of_file(row: Architecture, header: GgufHeader) -> tuple[Rule, ...]:
    """Return the rules of a row, for the tensors that a file has."""
    rules = list(row.all_rules())
    for ending, joined in _JOINED:
        rules = [rule for rule in rules if rule not in joined]
        if any(name.endswith(ending) for name in header.tensors):
            rules = [*joined, *rules]
    return tuple(rules)
