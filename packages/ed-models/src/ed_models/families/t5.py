"""T5 (Raffel et al. 2020), and T5 v1.1 (Shazeer 2020): an encoder-decoder with relative positions.

- pre-norm layers with RMSNorm, no biases, scores without a scale
- one table of relative position buckets for all layers of the encoder, one for the decoder
- feed-forward with ReLU (v1.0) or gated GELU (v1.1)
- v1.0: the head is the embedding, and its inputs are scaled by `d_model ** -0.5`; v1.1: a separate
  head without a scale

Numbers and parameter names follow Hugging Face's `modeling_t5.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.cross_attention import CrossAttention
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, RelativeBuckets, ScoreRule
from ed_layers.mlp import MLP, GatedMLP
from ed_layers.parts import Parts

from ed_models.body.encoder_decoder import CrossAttentionLayer, EncoderDecoder, LayerStack
from ed_models.body.layers import DecoderLayer
from ed_models.checkpoints.tensor_files import Computed, TensorFiles
from ed_models.tasks.seq2seq import Seq2SeqLM
from ed_models.weights.blocks import Relation, Shape
from ed_models.weights.rules import STANDARD, Rule, ignore, renamed, transpose


@register_config("t5")
class T5Config(EasyDeLBaseConfig, transformers.T5Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "t5"
    attribute_map = {
        **transformers.T5Config.attribute_map,
        "attention_dropout": "dropout_rate",
        "hidden_act": "dense_act_fn",
        "intermediate_size": "d_ff",
        "rms_norm_eps": "layer_norm_epsilon",
    }
    # `transformers` computes these fields, and writes them to config.json.
    known_keywords = frozenset(
        {"dense_act_fn", "is_gated_act", "scale_decoder_outputs", "tie_word_embeddings"}
    )

    @property
    def initializer_range(self) -> float:
        """Standard deviation of initial matrices."""
        return 0.02 * self.initializer_factor


def attention(parts: Parts, *, causal: bool) -> SelfAttention:
    """Create self-attention with relative positions."""
    config: T5Config = parts.config
    return SelfAttention(
        parts,
        position=RelativeBuckets(config.relative_attention_max_distance),
        mask=MaskRule(causal=causal),
        scores=ScoreRule(scale=1.0),
    )


def feed_forward(parts: Parts) -> GatedMLP | MLP:
    """Create the feed-forward layer."""
    config: T5Config = parts.config
    if config.is_gated_act:
        return GatedMLP(parts, dropout=config.dropout_rate)
    return MLP(parts, bias=False, dropout=config.dropout_rate)


def encoder_layer(parts: Parts, index: int) -> DecoderLayer:
    """Create a layer of the encoder."""
    return DecoderLayer(
        parts,
        self_attn=attention(parts, causal=False),
        mlp=feed_forward(parts),
        dropout=parts.config.dropout_rate,
    )


def decoder_layer(parts: Parts, index: int) -> CrossAttentionLayer:
    """Create a layer of the decoder."""
    return CrossAttentionLayer(
        parts,
        self_attn=attention(parts, causal=True),
        cross_attn=CrossAttention(parts, scores=ScoreRule(scale=1.0)),
        mlp=feed_forward(parts),
        dropout=parts.config.dropout_rate,
    )


class T5Model(EncoderDecoder):
    """Embedding, encoder, decoder."""

    config_class = T5Config
    encoder_layer = staticmethod(encoder_layer)
    decoder_layer = staticmethod(decoder_layer)

    @staticmethod
    def stack_of(parts, layer, depth):
        config: T5Config = parts.config
        buckets, dropout = config.relative_attention_num_buckets, config.dropout_rate
        return LayerStack(parts, layer, depth, buckets=buckets, dropout=dropout)


def up_projection(ours: Mapping[str, Shape], hf: Callable[..., str], config: T5Config) -> Relation:
    """Relate `up_proj` to the second of two input projections, or to the only one."""
    name = "wi_1" if config.is_gated_act else "wi"
    return transpose(ours, lambda **more: hf(up=name, **more), config)


def names() -> dict[str, str]:
    """Return the names of the parameters in checkpoints."""
    found = {"model.embed_tokens": "shared"}
    for side in ("encoder", "decoder"):
        ours, theirs = f"model.{side}.layers.{{i}}", f"{side}.block.{{i}}.layer"
        last = 1 if side == "encoder" else 2
        found |= {
            f"{ours}.self_attn.{p}_proj": f"{theirs}.0.SelfAttention.{p}"
            for p in ("q", "k", "v", "o")
        }
        found |= {
            f"{ours}.cross_attn.{p}_proj": f"{theirs}.1.EncDecAttention.{p}"
            for p in ("q", "k", "v", "o")
        }
        found |= {
            f"{ours}.input_layernorm": f"{theirs}.0.layer_norm",
            f"{ours}.cross_attention_layernorm": f"{theirs}.1.layer_norm",
            f"{ours}.post_attention_layernorm": f"{theirs}.{last}.layer_norm",
            f"{ours}.mlp.gate_proj": f"{theirs}.{last}.DenseReluDense.wi_0",
            f"{ours}.mlp.down_proj": f"{theirs}.{last}.DenseReluDense.wo",
            f"{ours}.mlp": f"{theirs}.{last}.DenseReluDense",
            f"model.{side}.norm": f"{side}.final_layer_norm",
            f"model.{side}.relative_attention_bias": (
                f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            ),
        }
    return found


def with_head(files: TensorFiles, wanted: Collection[str]) -> TensorFiles:
    """Return a checkpoint in which a missing separate head is a copy of the embedding.

    `transformers` omits the head of T5 v1.1 from files if it equals the embedding.
    """
    if "lm_head.weight" not in wanted or "lm_head.weight" in files or "shared.weight" not in files:
        return files
    head = Computed(files["shared.weight"], partial(files.read, "shared.weight"))
    return files.joined({"lm_head.weight": head})


@register_module(TaskType.SEQUENCE_TO_SEQUENCE, config=T5Config, model_type="t5")
class T5ForConditionalGeneration(Seq2SeqLM):
    """T5 with a language-model head."""

    body_class = T5Model
    WEIGHTS = renamed(
        names(),
        Rule("{path}.mlp.up_proj.kernel", "{path}.mlp.{up}.weight", up_projection),
        *STANDARD,
        # Copies of the shared embedding.
        ignore("encoder.embed_tokens.weight"),
        ignore("decoder.embed_tokens.weight"),
    )

    as_published = staticmethod(with_head)

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding, as in T5 v1.0."""
        return self.config.scale_decoder_outputs

    def head(self):
        head = super().head()
        return replace(head, scale=self.config.d_model**-0.5) if self.is_tied else head
