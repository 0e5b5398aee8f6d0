"""Moonshine (Jeffries et al. 2024): speech to text, for speech of any length up to a minute.

- the encoder reads samples of sound through three convolutions
- both stacks: pre-norm, layer norms without biases, interleaved partial rotary positions
- feed-forward with GELU in the encoder, gated in the decoder

Numbers and parameter names follow Hugging Face's `modeling_moonshine.py`. A padded row has the
numbers of the row alone; Hugging Face's norm of the first convolution includes the padding.

Legend: b batch, n samples, t encoder positions, d hidden.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.cross_attention import CrossAttention
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, Rotary
from ed_layers.convolution import Convolution, GroupNorm, real_steps
from ed_layers.mlp import MLP, GatedMLP
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_models.body.encoder_decoder import CrossAttentionLayer, EncoderDecoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.seq2seq import DECODER_INPUTS, Seq2SeqLM
from ed_models.weights.rules import STANDARD, Rule, equal, ignore, permute, renamed, split

DECODER_MLP = "model.decoder.layers.{i}.mlp"


@register_config("moonshine")
class MoonshineConfig(EasyDeLBaseConfig, transformers.MoonshineConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "moonshine"
    attribute_map = {
        **transformers.MoonshineConfig.attribute_map,
        "num_decoder_layers": "decoder_num_hidden_layers",
    }


class MoonshineFrontEnd(nnx.Module):
    """Three convolutions over samples of sound; one encoder position covers 384 samples."""

    def __init__(self, parts: Parts):
        d = parts.config.hidden_size
        self.conv1 = Convolution(parts, 1, d, taps=127, stride=64, bias=False)
        self.groupnorm = GroupNorm(parts, d, groups=1)
        self.conv2 = Convolution(parts, d, 2 * d, taps=7, stride=3)
        self.conv3 = Convolution(parts, 2 * d, d, taps=3, stride=2)

    def __call__(
        self, samples: Float[Array, "b n"], lengths: Int[Array, " b"]
    ) -> tuple[Float[Array, "b t d"], Int[Array, " b"]]:
        x = jnp.tanh(self.conv1(samples[..., None]))
        lengths = self.conv1.lengths(lengths)
        x = self.groupnorm(x, real_steps(lengths, x.shape[1]))
        for conv in (self.conv2, self.conv3):
            x, lengths = jax.nn.gelu(conv(x), approximate=False), conv.lengths(lengths)
        return x, lengths


def _attention(parts: Parts, side: str, mask: MaskRule = MaskRule()) -> SelfAttention:  # noqa: B008
    """Create the self-attention of the encoder or of the decoder."""
    config = parts.config
    return SelfAttention(
        parts,
        heads=getattr(config, f"{side}_num_attention_heads"),
        kv_heads=getattr(config, f"{side}_num_key_value_heads"),
        bias=config.attention_bias,
        out_bias=False,
        position=Rotary(interleaved=True),
        mask=mask,
    )


def _encoder_layer(parts: Parts, index: int) -> DecoderLayer:
    """Create a layer of the encoder."""
    return DecoderLayer(
        parts,
        self_attn=_attention(parts, "encoder", MaskRule(causal=False)),
        mlp=MLP(parts, hidden_act=parts.config.encoder_hidden_act),
    )


def _decoder_layer(parts: Parts, index: int) -> CrossAttentionLayer:
    """Create a layer of the decoder."""
    config = parts.config
    cross = CrossAttention(parts, bias=config.attention_bias, out_bias=False)
    mlp = GatedMLP(parts, hidden_act=config.decoder_hidden_act, bias=True)
    self_attention = _attention(parts, "decoder")
    return CrossAttentionLayer(parts, self_attn=self_attention, cross_attn=cross, mlp=mlp)


class MoonshineModel(EncoderDecoder):
    """Convolutions, encoder, embedding, decoder."""

    config_class = MoonshineConfig
    encoder_layer = staticmethod(_encoder_layer)
    decoder_layer = staticmethod(_decoder_layer)
    ropes = None

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=1e-5, bias=False)

    @classmethod
    def encoder_stack(cls, parts):
        return cls.build_stack(parts, cls.encoder_layer, parts.config.encoder_num_hidden_layers)

    def add_embeddings(self, parts):
        config = parts.config
        heads = config.encoder_num_attention_heads, config.decoder_num_attention_heads
        if heads[0] != heads[1]:
            raise ConfigError(
                f"moonshine: encoder and decoder have {heads[0]} and {heads[1]} heads; only equal "
                "numbers are supported"
            )
        padding = config.pad_token_id
        self.embed_tokens = parts.embed(config.vocab_size, config.hidden_size, padding=padding)
        self.front_end = MoonshineFrontEnd(parts)

    def encoder_inputs(self, inputs, key):
        samples, mask = inputs["input_values"], inputs.get("attention_mask")
        b, n = samples.shape
        lengths = jnp.full((b,), n) if mask is None else jnp.sum(mask != 0, axis=1)
        x, lengths = self.front_end(samples, lengths)
        return x, {"attention_mask": real_steps(lengths, x.shape[1]).astype(jnp.int32)}


@register_module(
    TaskType.SPEECH_SEQUENCE_TO_SEQUENCE, config=MoonshineConfig, model_type="moonshine"
)
class MoonshineForConditionalGeneration(Seq2SeqLM):
    """Moonshine with a language-model head."""

    body_class = MoonshineModel
    input_names = ("input_values", "attention_mask", *DECODER_INPUTS)
    WEIGHTS = (
        Rule("model.embed_tokens.embedding", "model.decoder.embed_tokens.weight", equal),
        Rule("model.front_end.{conv}.kernel", "model.encoder.{conv}.weight", permute(2, 1, 0)),
        Rule("model.front_end.{part}", "model.encoder.{part}", equal),
        Rule(
            (f"{DECODER_MLP}.up_proj.kernel", f"{DECODER_MLP}.gate_proj.kernel"),
            f"{DECODER_MLP}.fc1.weight",
            split(-2),
        ),
        Rule(
            (f"{DECODER_MLP}.up_proj.bias", f"{DECODER_MLP}.gate_proj.bias"),
            f"{DECODER_MLP}.fc1.bias",
            split(-1, equal),
        ),
        *renamed(
            {
                "lm_head": "proj_out",
                "model.encoder.norm": "model.encoder.layer_norm",
                "cross_attn": "encoder_attn",
                "cross_attention_layernorm": "post_attention_layernorm",
                "model.decoder.layers.{i}.post_attention_layernorm": (
                    "model.decoder.layers.{i}.final_layernorm"
                ),
                "mlp.up_proj": "mlp.fc1",
                "mlp.down_proj": "mlp.fc2",
            },
            *STANDARD,
        ),
        ignore("proj_out.weight"),
    )
