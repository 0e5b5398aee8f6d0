"""BERT (Devlin et al. 2019): a bidirectional encoder with learned positions and post-norm layers.

- embeddings of tokens, positions and token types are added and normalized
- the pooled output is the first token after a linear layer and tanh
- further tasks: sequence classification, and embeddings (the mean of all tokens by default)

Numbers and parameter names follow Hugging Face's `modeling_bert.py`.

Legend: b batch, s sequence, d hidden, c labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.outputs import BaseModelOutput, LayerReport, SequenceClassifierOutput
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule
from ed_layers.mlp import MLP
from ed_layers.parts import Parts
from jaxtyping import Array, Float, Int

from ed_models.base.module import EasyDeLBaseModule
from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.checkpoints.task_rules import SCORE
from ed_models.tasks.classification import SequenceClassifier
from ed_models.tasks.embedding import Embedder, body_of
from ed_models.weights.blocks import Shape
from ed_models.weights.rules import STANDARD, ignore, renamed

#: Endings of the names of Hugging Face's classes without a pooler.
WITHOUT_POOLER = ("MaskedLM", "LMHeadModel", "TokenClassification", "QuestionAnswering")


@register_config("bert")
class BertConfig(EasyDeLBaseConfig, transformers.BertConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "bert"
    attribute_map = {
        **transformers.BertConfig.attribute_map,
        "attention_dropout": "attention_probs_dropout_prob",
    }

    def validate(self):
        """Raise ConfigError for decoders."""
        super().validate()  # type: ignore[misc]
        for name in ("is_decoder", "add_cross_attention"):
            if getattr(self, name):
                raise ConfigError(f"bert: {name}=True is not supported, only encoders are")


class BertLayer(DecoderLayer):
    """Bidirectional attention and feed-forward, with a norm after each addition."""

    def __init__(self, parts: Parts, index: int):
        config: BertConfig = parts.config
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, bias=True, position=None, mask=MaskRule(causal=False)),
            mlp=MLP(parts),
            dropout=config.hidden_dropout_prob,
        )

    def __call__(self, x, ctx, cache, layer):
        attended, cache = self.self_attn(x, ctx, cache, layer)
        x = self.input_layernorm(x + ctx.dropped(attended, self.dropout, "attention"))
        x = ctx.named(x, "residual")
        out = ctx.dropped(self.mlp(x, ctx), self.dropout, "mlp")
        return self.post_attention_layernorm(x + out), cache, LayerReport()


class BertModel(Decoder):
    """Embeddings, bidirectional layers, pooler."""

    config_class = BertConfig
    layer_class = BertLayer
    input_names = (*EasyDeLBaseModule.input_names, "token_type_ids")

    @staticmethod
    def norm_of(parts):
        return partial(parts.layer_norm, eps=parts.config.layer_norm_eps)

    @staticmethod
    def final_norm(parts):
        return None

    def add_parts(self, parts):
        config, d = parts.config, parts.config.hidden_size
        self.embed_positions = parts.embed(config.max_position_embeddings, d)
        self.embed_types = parts.embed(config.type_vocab_size, d)
        self.embed_norm = parts.own_norm(d)
        self.pooler = parts.linear(d, d, axes=("embed", None), bias=True)

    def enter(self, x, ctx):
        x = self.embed_norm(x + self.embed_positions(ctx.position_ids))
        return ctx.dropped(x, self.config.hidden_dropout_prob, "embeddings")

    def leave(self, x, ctx):
        return x

    def rope_settings(self):
        return {}

    def cache_specs(self):
        return EasyDeLBaseModule.cache_specs(self)

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        inputs_embeds: Float[Array, "b s d"] | None = None,
        token_type_ids: Int[Array, "b s"] | None = None,
        attention_mask: Int[Array, "b s"] | None = None,
        **inputs: Any,
    ) -> BaseModelOutput:
        """Run the encoder.

        Args:
            input_ids: token ids [b, s], or `inputs_embeds` [b, s, d] instead.
            token_type_ids: 0 for the first text of a pair, 1 for the second; default: 0.
            attention_mask: nonzero = a token, [b, s].
            inputs: `segment_ids`, `position_ids`, `key` and `output_hidden_states`; see
                `CausalLM.__call__`.
        """
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        types = jnp.zeros(x.shape[:2], jnp.int32) if token_type_ids is None else token_type_ids
        x = x + self.embed_types(types)
        output = super().__call__(inputs_embeds=x, attention_mask=attention_mask, **inputs)
        pooled = self.pool(first_tokens(output.last_hidden_state, attention_mask))
        return output.replace(pooler_output=pooled)

    @classmethod
    def new_tensors(
        cls, config: EasyDeLBaseConfig, shapes: Mapping[str, Shape]
    ) -> Mapping[str, np.ndarray]:
        """Return a random pooler for a checkpoint of a task without a pooler."""
        return new_pooler(config, shapes)

    def pool(self, x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
        """Return the pooled output of first tokens."""
        return jnp.tanh(self.pooler(x))


def new_pooler(config: Any, shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
    """Return a random pooler if the class of a checkpoint has none; otherwise no tensors."""
    if not any(name.endswith(WITHOUT_POOLER) for name in config.architectures or []):
        return {}
    draw = np.random.default_rng(1)
    return {
        name: (draw.normal(0.0, config.initializer_range, shape) * (len(shape) == 2)).astype("f4")
        for name, shape in shapes.items()
        if "pooler.dense" in name
    }


def first_tokens(
    hidden: Float[Array, "b s d"], attention_mask: Int[Array, "b s"] | None
) -> Float[Array, "b d"]:
    """Return the hidden state of the first token of each row."""
    if attention_mask is None:
        return hidden[:, 0]
    first = jnp.argmax(jnp.asarray(attention_mask) != 0, axis=1)
    return jnp.take_along_axis(hidden, first[:, None, None], axis=1)[:, 0]


@register_module(TaskType.SEQUENCE_CLASSIFICATION, config=BertConfig, model_type="bert")
class BertForSequenceClassification(SequenceClassifier[BertModel]):
    """BERT with a linear layer from the pooled output to labels."""

    body_class = BertModel
    input_names = BertModel.input_names
    DERIVED = {TaskType.BASE_MODULE: body_of, TaskType.EMBEDDING: Embedder.for_family}
    TIED_WEIGHTS = {}
    # Names of norms in the checkpoints of the first release.
    OTHER_NAMES = {"gamma": "weight", "beta": "bias"}
    WEIGHTS = renamed(
        {
            "score": "classifier",
            "model.embed_tokens": "bert.embeddings.word_embeddings",
            "model.embed_positions": "bert.embeddings.position_embeddings",
            "model.embed_types": "bert.embeddings.token_type_embeddings",
            "model.embed_norm": "bert.embeddings.LayerNorm",
            "model.pooler": "bert.pooler.dense",
            "model.layers": "bert.encoder.layer",
            "model": "bert",
            "self_attn.q_proj": "attention.self.query",
            "self_attn.k_proj": "attention.self.key",
            "self_attn.v_proj": "attention.self.value",
            "self_attn.o_proj": "attention.output.dense",
            "input_layernorm": "attention.output.LayerNorm",
            "mlp.up_proj": "intermediate.dense",
            "mlp.down_proj": "output.dense",
            "post_attention_layernorm": "output.LayerNorm",
        },
        *STANDARD,
        # Heads of other tasks, and positions that the configuration determines.
        ignore("cls.{path}"),
        ignore("classifier.{path}"),
        ignore("{path}.position_ids"),
    )

    def add_head(self, parts: Parts) -> None:
        """Create the matrix [d, c] and the bias; `config.num_labels` is c."""
        super().add_head(parts)
        self.score = parts.linear(
            self.features, self.config.num_labels, axes=("embed", None), bias=True
        )

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        attention_mask: Int[Array, "b s"] | None = None,
        segment_ids: Int[Array, "b s"] | None = None,
        logits_at: Literal["last", "all"] = "last",
        key: jax.Array | None = None,
        **inputs: Any,
    ) -> SequenceClassifierOutput:
        """Score the first token of each row, or every token.

        Args:
            input_ids: token ids [b, s].
            attention_mask: nonzero = a token, [b, s].
            segment_ids: packed documents 1, 2, ...; 0 = padding; then `logits_at` is "all".
            logits_at: "last": one score per row, of its first token, [b, c]; "all" [b, s, c], of
                which a packed document uses its first token.
            key: dropout key; None = deterministic.
            inputs: further arguments of `BertModel`.

        Raises:
            ConfigError: packed rows with `logits_at` "last".
        """
        if segment_ids is not None and logits_at == "last":
            raise ConfigError('a packed row has several first tokens: set logits_at="all"')
        body = self.model(
            input_ids, attention_mask=attention_mask, segment_ids=segment_ids, key=key, **inputs
        )
        hidden = body.last_hidden_state
        pooled = body.pooler_output if logits_at == "last" else self.model.pool(hidden)
        config = cast(BertConfig, self.config)
        rate = config.classifier_dropout
        rate = config.hidden_dropout_prob if rate is None else rate
        assert pooled is not None
        if key is not None and rate:
            kept = jax.random.bernoulli(jax.random.fold_in(key, 1), 1 - rate, pooled.shape)
            pooled = jnp.where(kept, pooled / (1 - rate), 0)
        return SequenceClassifierOutput(
            logits=self.score(pooled).astype(jnp.float32),
            last_hidden_state=hidden,
            hidden_states=body.hidden_states,
        )

    @classmethod
    def new_tensors(
        cls, config: EasyDeLBaseConfig, shapes: Mapping[str, Shape]
    ) -> Mapping[str, np.ndarray]:
        """Return a random head for a checkpoint of another task, and a pooler if it has none."""
        new = super().new_tensors(config, {**shapes, SCORE.hf: shapes["classifier.weight"]})
        if not new:
            return {}
        head = {
            "classifier.weight": new[SCORE.hf],
            "classifier.bias": np.zeros(shapes["classifier.bias"], np.float32),
        }
        return {**head, **new_pooler(config, shapes)}
