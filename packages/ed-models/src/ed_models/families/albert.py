"""ALBERT (Lan et al. 2020): BERT with one layer that is applied many times.

- the embeddings are smaller than the hidden states and projected
- `num_hidden_layers` counts the applications of the group of `inner_group_num` layers

Numbers and parameter names follow Hugging Face's `modeling_albert.py`.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.outputs import LayerReport
from ed_infra.registry import register_config, register_module

from ed_models.body.encoder import TextEncoder
from ed_models.tasks.encoder_names import EncoderNames, HeadNames
from ed_models.tasks.encoders import MaskedLM


@register_config("albert")
class AlbertConfig(EasyDeLBaseConfig, transformers.AlbertConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "albert"
    attribute_map = {
        **transformers.AlbertConfig.attribute_map,
        "attention_dropout": "attention_probs_dropout_prob",
        "classifier_dropout": "classifier_dropout_prob",
    }

    def validate(self):
        """Raise ConfigError for several groups of layers."""
        super().validate()
        if self.num_hidden_groups != 1:
            raise ConfigError(
                f"albert: num_hidden_groups={self.num_hidden_groups} is not supported; published "
                "models have 1"
            )


class AlbertModel(TextEncoder):
    """Embeddings, a projection, and a group of layers that is applied many times."""

    config_class = AlbertConfig

    @staticmethod
    def projects_embeddings(config: EasyDeLBaseConfig) -> bool:
        return True

    @staticmethod
    def depth(config: EasyDeLBaseConfig) -> int:
        return config.inner_group_num

    def through(self, x, ctx, cache, input_ids, *, keep_hidden):
        report, hidden = LayerReport(), (x,)
        for turn in range(self.config.num_hidden_layers):
            layer_ctx = ctx if ctx.key is None else ctx.at_layer(turn)
            x, cache, more, _ = self.layers(x, layer_ctx, cache, keep_hidden=False)
            report, hidden = report + more, (*hidden, x)
        return x, cache, report, hidden if keep_hidden else None


@register_module(TaskType.MASKED_LM, config=AlbertConfig, model_type="albert")
class AlbertForMaskedLM(MaskedLM):
    """ALBERT with a head that predicts tokens."""

    body_class = AlbertModel
    names = EncoderNames(
        body={
            "model.embed_tokens": "albert.embeddings.word_embeddings",
            "model.embed_positions": "albert.embeddings.position_embeddings",
            "model.embed_types": "albert.embeddings.token_type_embeddings",
            "model.embed_norm": "albert.embeddings.LayerNorm",
            "model.embed_proj": "albert.encoder.embedding_hidden_mapping_in",
            "model.layers": "albert.encoder.albert_layer_groups.0.albert_layers",
            "self_attn.q_proj": "attention.query",
            "self_attn.k_proj": "attention.key",
            "self_attn.v_proj": "attention.value",
            "self_attn.o_proj": "attention.dense",
            "input_layernorm": "attention.LayerNorm",
            "mlp.up_proj": "ffn",
            "mlp.down_proj": "ffn_output",
            "post_attention_layernorm": "full_layer_layer_norm",
        },
        heads={
            TaskType.MASKED_LM: HeadNames(
                out="predictions.decoder",
                dense="predictions.dense",
                norm="predictions.LayerNorm",
                bias="predictions.bias",
                activation="hidden_act",
                dropout=None,
            ),
            TaskType.BASE_MODULE: HeadNames("albert.pooler"),
            TaskType.SEQUENCE_CLASSIFICATION: HeadNames("classifier", "albert.pooler"),
            TaskType.MULTIPLE_CHOICE: HeadNames("classifier", "albert.pooler"),
            TaskType.TOKEN_CLASSIFICATION: HeadNames("classifier"),
            TaskType.QUESTION_ANSWERING: HeadNames("qa_outputs", dropout=None),
        },
        ignored_names=("sop_classifier",),
    )
