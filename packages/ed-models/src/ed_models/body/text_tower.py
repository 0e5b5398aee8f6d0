"""Text towers of models that compare images with texts.

Legend: b batch, s sequence, d hidden.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo
from ed_infra.outputs import BaseModelOutput
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule
from ed_layers.mlp import MLP
from ed_layers.parts import Parts
from jaxtyping import Array, Float, Int

from ed_models.base.module import EasyDeLBaseModule
from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.weights.rules import STANDARD, renamed

#: Parts of our names -> those of the text towers of CLIP and SigLIP.
TEXT_NAMES = {
    "embed_tokens": "embeddings.token_embedding",
    "embed_positions": "embeddings.position_embedding",
    "layers": "encoder.layers",
    "input_layernorm": "layer_norm1",
    "post_attention_layernorm": "layer_norm2",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
    "norm": "final_layer_norm",
    "pooler": "head",
}


class TextLayer(DecoderLayer):
    """A pre-norm layer; `causal` of the tower decides which tokens a token attends to."""

    causal: ClassVar[bool] = True

    def __init__(self, parts: Parts, index: int):
        mask = MaskRule(causal=self.causal)
        attention = SelfAttention(parts, bias=True, position=None, mask=mask)
        super().__init__(parts, self_attn=attention, mlp=MLP(parts))


class BidirectionalTextLayer(TextLayer):
    """A pre-norm layer in which a token attends to all tokens."""

    causal = False


class TextTower(Decoder):
    """Embeddings with learned positions, layers, a norm and a pooled output.

    Subclasses set `layer_class`, and override `pool_features`.
    """

    layer_class = TextLayer
    input_names = ("input_ids", "attention_mask")
    WEIGHTS = renamed(TEXT_NAMES, *STANDARD)
    #: Names of the tower in checkpoints of both towers, and of a tower alone.
    TOWER_NAMES: ClassVar[tuple[str, ...]] = ("text_model",)

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=parts.config.layer_norm_eps)

    def add_parts(self, parts: Parts):
        config = parts.config
        self.embed_positions = parts.embed(config.max_position_embeddings, config.hidden_size)

    def enter(self, x, ctx):
        return x + self.embed_positions(ctx.position_ids)

    def rope_settings(self):
        return {}

    def cache_specs(self):
        return EasyDeLBaseModule.cache_specs(self)

    @abstractmethod
    def pool_features(
        self, x: Float[Array, "b s d"], input_ids: Int[Array, "b s"]
    ) -> Float[Array, "b e"]:
        """Return the features of each text."""

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        attention_mask: Int[Array, "b s"] | None = None,
        **inputs: Any,
    ) -> BaseModelOutput:
        """Encode texts.

        Args:
            input_ids: token ids [b, s].
            attention_mask: nonzero = a token that others attend to; default: all tokens.
            inputs: `position_ids` (default: counted from the first token), `key` and
                `output_hidden_states`; see `CausalLM.__call__`.

        Returns:
            Hidden states [b, s, d], and the pooled features [b, e].

        Raises:
            ConfigError: a text is longer than the table of positions.
        """
        if input_ids is None:
            raise TypeError("pass input_ids: the pooling reads the tokens")
        b, s = input_ids.shape
        limit = self.config.max_position_embeddings
        if s > limit:
            raise ConfigError(
                f"a text has {s} tokens, but the model has positions for {limit}: truncate the text"
            )
        mask = MaskInfo.full(b, s)
        if attention_mask is not None:  # padding attends to tokens, and no token to padding
            tokens = (jnp.asarray(attention_mask) != 0).astype(jnp.int32)
            mask = replace(mask, kv_segment_ids=tokens, in_order=False)
            places = jnp.arange(s) - jnp.argmax(tokens, axis=1)[:, None]
            inputs.setdefault("position_ids", jnp.maximum(places, 0))
        output = super().__call__(input_ids, mask_info=mask, **inputs)
        return output.replace(pooler_output=self.pool_features(output.last_hidden_state, input_ids))
