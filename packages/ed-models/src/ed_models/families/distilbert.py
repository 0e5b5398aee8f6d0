"""DistilBERT (Sanh et al. 2019): BERT with half the layers, without token types and pooler.

Numbers and parameter names follow Hugging Face's `modeling_distilbert.py`.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module

from ed_models.body.encoder import TextEncoder
from ed_models.tasks.encoder_names import EncoderNames, HeadNames
from ed_models.tasks.encoders import MaskedLM


@register_config("distilbert")
class DistilBertConfig(EasyDeLBaseConfig, transformers.DistilBertConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "distilbert"
    attribute_map = {
        **transformers.DistilBertConfig.attribute_map,
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
        "hidden_dropout_prob": "dropout",
    }


class DistilBertModel(TextEncoder):
    """Embeddings, bidirectional layers."""

    config_class = DistilBertConfig

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=1e-12)


@register_module(TaskType.MASKED_LM, config=DistilBertConfig, model_type="distilbert")
class DistilBertForMaskedLM(MaskedLM):
    """DistilBERT with a head that predicts tokens."""

    body_class = DistilBertModel
    names = EncoderNames(
        body={
            "model.embed_tokens": "distilbert.embeddings.word_embeddings",
            "model.embed_positions": "distilbert.embeddings.position_embeddings",
            "model.embed_norm": "distilbert.embeddings.LayerNorm",
            "model.layers": "distilbert.transformer.layer",
            "self_attn.q_proj": "attention.q_lin",
            "self_attn.k_proj": "attention.k_lin",
            "self_attn.v_proj": "attention.v_lin",
            "self_attn.o_proj": "attention.out_lin",
            "input_layernorm": "sa_layer_norm",
            "mlp.up_proj": "ffn.lin1",
            "mlp.down_proj": "ffn.lin2",
            "post_attention_layernorm": "output_layer_norm",
        },
        heads={
            TaskType.MASKED_LM: HeadNames(
                out="vocab_projector",
                dense="vocab_transform",
                norm="vocab_layer_norm",
                bias="vocab_projector.bias",
                activation="hidden_act",
                dropout=None,
            ),
            TaskType.SEQUENCE_CLASSIFICATION: HeadNames(
                "classifier", "pre_classifier", activation="relu", dropout="seq_classif_dropout"
            ),
            TaskType.MULTIPLE_CHOICE: HeadNames(
                "classifier", "pre_classifier", activation="relu", dropout="seq_classif_dropout"
            ),
            TaskType.TOKEN_CLASSIFICATION: HeadNames("classifier"),
            TaskType.QUESTION_ANSWERING: HeadNames("qa_outputs", dropout="qa_dropout"),
        },
    )
