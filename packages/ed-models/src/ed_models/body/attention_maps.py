"""The attention of a decoder's layers, computed from the hidden states of a forward pass.

Each layer is recomputed from its input. In a compiled program, only the computation of its queries
and keys remains.

Legend: b batch, s sequence, d hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ed_infra.errors import ConfigError
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.kernels.vanilla import Watched
from ed_layers.cache.storage import Layer
from ed_layers.context import Ctx
from flax import nnx
from jaxtyping import Array, Float

from ed_models.body.context import layer_context
from ed_models.body.decoder import Decoder


class _Recorder:
    """An attention that also records its queries and keys."""

    def __init__(self, attention: SelfAttention, seen: list[Watched]):
        self.attention, self.seen = attention, seen

    def __call__(
        self, x: Float[Array, "b s d"], ctx: Ctx, cache: None, layer: Layer
    ) -> tuple[Float[Array, "b s d"], None]:
        q, k, _ = self.attention.compute_qkv(x, ctx)
        if k is not None and ctx.mask_info is not None:
            self.seen.append(Watched(q, k, ctx.mask_info, self.attention.scoring(ctx)))
        return self.attention(x, ctx, cache, layer)


def watched_attention(
    model: Any,
    hidden_states: Sequence[Float[Array, "b s d"]],
    layers: Sequence[int],
    **inputs: Any,
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
    records: list[Watched] = []
    for layer in layers:
        seen: list[Watched] = []
        module = nnx.merge(*nnx.split(body.layers.layer(layer)))
        for name, part in list(vars(module).items()):
            if isinstance(part, SelfAttention):
                setattr(module, name, _Recorder(part, seen))
        module(hidden_states[layer], ctx, None, layer)
        if len(seen) != 1:
            raise ConfigError(
                f"layer {layer} of {type(model).__name__} has no attention that can be compared: "
                "remove it from attention_layers"
            )
        records += seen
    return records
