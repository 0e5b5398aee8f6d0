"""The attention of a decoder's layers, computed from the hidden states of a forward pass.

Each layer is recomputed from its input. In a compiled program, only the computation of its queries
and keys remains.

Legend: b batch, s sequence, d hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ed_infra.errors import ConfigError
from ed_layers.attention.weights import Watched
from jaxtyping import Array, Float

from ed_models.body.context import layer_context
from ed_models.body.decoder import Decoder


def watched_attention(
    model: Any, hidden_states: Sequence[Float[Array, "b s d"]], layers: Sequence[int], **inputs: Any
) -> list[Watched]:
    """Return the queries and keys of the attention of some layers.

    Args:
        model: a `CausalLM`.
        hidden_states: the input of every layer, as returned with `output_hidden_states`.
        layers: layer indices, from 0.
        inputs: masks and positions of the same forward pass.

    Raises:
        ConfigError: the layers of this model do not expose their attention.
    """
    body = model.model
    if not isinstance(body, Decoder) or type(body).through is not Decoder.through:
        raise ConfigError(f"the layers of {type(model).__name__} do not show their attention")
    b, s, _ = hidden_states[0].shape
    ctx, _ = layer_context(body.config, (b, s), ropes=body.rope_settings(), **inputs)
    found: list[Watched] = []
    for layer in layers:
        seen: list[Watched] = []
        body.layers.layer(layer)(hidden_states[layer], replace(ctx, watch=seen.append), None, layer)
        if len(seen) != 1:
            raise ConfigError(
                f"layer {layer} of {type(model).__name__} has no attention that can be compared: "
                "leave it out of attention_layers"
            )
        found += seen
    return found
