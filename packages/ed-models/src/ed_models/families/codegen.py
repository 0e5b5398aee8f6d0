"""CodeGen (Salesforce 2022): attention and feed-forward side by side behind one layer norm.

- rotary pairs are neighbours, the first `rotary_dim` dimensions of each head turn
- one tensor for queries, values and keys, which contains four groups of heads
- biases in the feed-forward and in the head, none in attention

Numbers follow Hugging Face's `modeling_codegen.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module
from ed_infra.rope.frequencies import RopeSettings
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import Rotary
from ed_layers.context import ALL_LAYERS
from ed_layers.mlp import MLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import ParallelLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, fused, ignore, renamed


@register_config("codegen")
class CodeGenConfig(EasyDeLBaseConfig, transformers.CodeGenConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "codegen"
    attribute_map = {**transformers.CodeGenConfig.attribute_map, "attention_dropout": "attn_pdrop"}

    def validate(self):
        """Refuse a tied head, which has no bias."""
        super().validate()
        if self.tie_word_embeddings:
            raise ConfigError(
                "codegen: tie_word_embeddings=True is not supported: a tied head has no bias, so "
                "use a checkpoint with tie_word_embeddings=False"
            )


class CodeGenDecoderLayer(ParallelLayer):
    """Attention and feed-forward, side by side behind one norm."""

    def __init__(self, parts: Parts, index: int):
        config: CodeGenConfig = parts.config
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, position=Rotary(interleaved=True)),
            mlp=MLP(
                parts,
                config.n_inner or 4 * config.hidden_size,
                hidden_act=config.activation_function,
            ),
            dropout=config.resid_pdrop,
        )


class CodeGenModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = CodeGenConfig
    layer_class = CodeGenDecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=parts.config.layer_norm_epsilon)

    def enter(self, x, ctx):
        return ctx.apply_dropout(x, self.config.embd_pdrop, "embeddings")

    def rope_settings(self):
        return {ALL_LAYERS: RopeSettings({}, head_dim=self.config.rotary_dim)}


@register_module(TaskType.CAUSAL_LM, config=CodeGenConfig, model_type="codegen")
class CodeGenForCausalLM(CausalLM):
    """CodeGen with a language-model head."""

    body_class = CodeGenModel

    WEIGHTS = renamed(
        {
            "model.norm": "transformer.ln_f",
            "model.embed_tokens": "transformer.wte",
            "model.layers": "transformer.h",
            "self_attn.o_proj": "attn.out_proj",
            "mlp.up_proj": "mlp.fc_in",
            "mlp.down_proj": "mlp.fc_out",
            "model": "transformer",
            "input_layernorm": "ln_1",
            "self_attn": "attn",
        },
        *fused(("q_proj", "v_proj", "k_proj"), "qkv_proj", groups=4),
        *STANDARD,
        ignore("{path}.attn.causal_mask"),
    )

    @property
    def head_bias(self):
        return True
