"""Wav2Vec2 (Baevski et al. 2020) with a CTC head: speech to characters.

- convolutions over samples of sound; the first, or all of them, with a norm
- positions are a convolution over the features of neighbouring time steps
- bidirectional layers, with norms after the additions, or before the parts
  (`do_stable_layer_norm`)

Numbers and parameter names follow Hugging Face's `modeling_wav2vec2.py`. A padded row has the
numbers of the row alone; Hugging Face's norm of the first convolution includes the padding.

Legend: b batch, n samples, t time steps, c features of a convolution, d hidden.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.outputs import BaseModelOutput
from ed_infra.registry import register_config, register_module
from ed_layers.convolution import real_steps
from ed_layers.parts import Parts
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ed_models.base.module import EasyDeLBaseModule
from ed_models.body.context import layer_context
from ed_models.body.spec_augment import SpecAugment
from ed_models.body.speech_encoder import DownsamplingAdapter, FrontEnd, SpeechEncoder
from ed_models.tasks.audio_classification import AudioClassifier
from ed_models.tasks.ctc import CTCModel
from ed_models.weights.rules import STANDARD, Rule, equal, permute, renamed


@register_config("wav2vec2")
class Wav2Vec2Config(EasyDeLBaseConfig, transformers.Wav2Vec2Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "wav2vec2"
    attribute_map = {
        **transformers.Wav2Vec2Config.attribute_map,
        "hidden_dropout_prob": "hidden_dropout",
    }
    # `transformers` computes this field, and writes it to config.json.
    known_keywords = frozenset({"num_feat_extract_layers"})

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.adapter_attn_dim is not None and not self.do_stable_layer_norm:
            raise ConfigError(
                f"wav2vec2: adapter_attn_dim={self.adapter_attn_dim} has an effect only with "
                "do_stable_layer_norm=True: set that field, or omit adapter_attn_dim"
            )


class Wav2Vec2Model(EasyDeLBaseModule):
    """Front end and encoder."""

    config_class = Wav2Vec2Config
    input_names = ("input_values", "attention_mask")

    def __init__(
        self,
        config: Wav2Vec2Config,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, dtype, param_dtype, precision)
        parts = Parts(config, rngs, self.dtype, self.param_dtype, precision)
        norm = partial(parts.layer_norm, eps=config.layer_norm_eps)
        parts = replace(parts, norm_of_family=norm)
        self.front_end = FrontEnd(parts)
        if config.mask_time_prob > 0 or config.mask_feature_prob > 0:
            self.masked_spec_embed = nnx.Param(
                jax.random.uniform(rngs.params(), (config.hidden_size,), self.param_dtype),
                axes=("embed",),
            )
        self.encoder = SpeechEncoder(parts)
        if config.add_adapter:
            self.adapter = DownsamplingAdapter(parts)

    @property
    def features(self) -> int:
        """Size of the outputs, d."""
        config = self.config
        return config.output_hidden_size if config.add_adapter else config.hidden_size

    def output_lengths(self, lengths: Int[Array, " b"]) -> Int[Array, " b"]:
        """Return the number of time steps t of rows with these numbers of samples."""
        for layer in self.front_end.conv_layers:
            lengths = layer.conv.lengths(lengths)
        return self.adapter.lengths(lengths) if hasattr(self, "adapter") else lengths

    def __call__(
        self,
        input_values: Float[Array, "b n"],
        *,
        attention_mask: Int[Array, "b n"] | None = None,
        key: jax.Array | None = None,
        output_hidden_states: bool = False,
    ) -> BaseModelOutput:
        """Run the encoder.

        Args:
            input_values: samples of sound.
            attention_mask: nonzero = a sample, zero = padding at the end of a row.
            key: key of dropout, skipped layers and SpecAugment; None = deterministic.
            output_hidden_states: also return the input of every layer and the last hidden state.
        """
        config = self.config
        b, n = input_values.shape
        mask = attention_mask
        lengths = jnp.full((b,), n) if mask is None else jnp.sum(mask != 0, axis=1)
        x, lengths = self.front_end(input_values, lengths)
        real = real_steps(lengths, x.shape[1]).astype(jnp.int32)
        shape = b, x.shape[1]
        ctx, _ = layer_context(config, shape, attention_mask=real, key=key, ropes={})
        x = ctx.apply_dropout(x, config.feat_proj_dropout, "features")
        if ctx.key is not None and config.apply_spec_augment:
            key = jax.random.fold_in(ctx.key, zlib.crc32(b"spec_augment"))
            masks = SpecAugment.of(config).masks(key, x.shape, lengths)
            if config.mask_time_prob > 0:
                x = jnp.where(masks.time, self.masked_spec_embed.get_value().astype(x.dtype), x)
            x = jnp.where(masks.feature, 0, x)
        x, report, hidden = self.encoder(x, ctx, keep_hidden=output_hidden_states)
        if hasattr(self, "adapter"):
            x = self.adapter(x, lengths)
        x = ctx.apply_dropout(x, config.final_dropout, "output")
        return BaseModelOutput(x, hidden_states=hidden, losses=report.losses, aux=report.metrics)


#: Our names of parameters -> the names of checkpoints.
_WEIGHTS = (
    Rule("model.masked_spec_embed", "wav2vec2.masked_spec_embed", equal),
    Rule(
        "model.encoder.pos_conv_embed.scale",
        "wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight.original0",
        permute(2, 1, 0),
    ),
    Rule(
        "model.encoder.pos_conv_embed.kernel",
        "wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight.original1",
        permute(2, 1, 0),
    ),
    *renamed(
        {
            "model.front_end.conv_layers": "wav2vec2.feature_extractor.conv_layers",
            "model.front_end": "wav2vec2.feature_projection",
            "model.encoder.pos_conv_embed": "wav2vec2.encoder.pos_conv_embed.conv",
            "model.encoder.norm": "wav2vec2.encoder.layer_norm",
            "model": "wav2vec2",
            "self_attn.o_proj": "attention.out_proj",
            "self_attn": "attention",
            "input_layernorm": "layer_norm",
            "post_attention_layernorm": "final_layer_norm",
            "mlp.up_proj": "feed_forward.intermediate_dense",
            "mlp.down_proj": "feed_forward.output_dense",
        },
        Rule("{path}.conv.kernel", "{path}.conv.weight", permute(2, 1, 0)),
        *STANDARD,
    ),
)


@register_module(TaskType.CTC, config=Wav2Vec2Config, model_type="wav2vec2")
class Wav2Vec2ForCTC(CTCModel):
    """Wav2Vec2 with a CTC head."""

    body_class = Wav2Vec2Model
    WEIGHTS = _WEIGHTS


@register_module(TaskType.AUDIO_CLASSIFICATION, config=Wav2Vec2Config, model_type="wav2vec2")
class Wav2Vec2ForSequenceClassification(AudioClassifier):
    """Wav2Vec2 with a head for labels of recordings."""

    body_class = Wav2Vec2Model
    WEIGHTS = _WEIGHTS
