"""GPT-2 (Radford et al. 2019): learned positions, layer norms, biases everywhere.

- matrices are stored [in, out]; one tensor for queries, keys and values
- scores of a layer may be divided by its number (`scale_attn_by_inverse_layer_idx`)
- head tied to the embedding

Numbers follow Hugging Face's `modeling_gpt2.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import ScoreRule
from ed_layers.mlp import MLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, Rule, equal, fused, ignore, renamed, transpose


@register_config("gpt2")
class GPT2Config(EasyDeLBaseConfig, transformers.GPT2Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "gpt2"
    attribute_map = {**transformers.GPT2Config.attribute_map, "attention_dropout": "attn_pdrop"}

    def validate(self):
        """Refuse what only an encoder's decoder needs."""
        super().validate()
        if self.add_cross_attention:
            raise ConfigError("gpt2 with add_cross_attention is no language model by itself")


class GPT2DecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: GPT2Config = parts.config
        d = config.hidden_size
        scale = (d // config.num_attention_heads) ** -0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scale /= index + 1
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, bias=True, position=None, scores=ScoreRule(scale=scale)),
            mlp=MLP(parts, config.n_inner or 4 * d, hidden_act=config.activation_function),
            dropout=config.resid_pdrop,
        )


class GPT2Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = GPT2Config
    layer_class = GPT2DecoderLayer

    @staticmethod
    def layer_kinds(config):
        each_its_own = config.scale_attn_by_inverse_layer_idx
        return range(config.num_hidden_layers) if each_its_own else None

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=parts.config.layer_norm_epsilon)

    def add_parts(self, parts):
        config = parts.config
        self.embed_positions = parts.embed(config.max_position_embeddings, config.hidden_size)

    def enter(self, x, ctx):
        x = x + self.embed_positions(ctx.position_ids)
        return ctx.apply_dropout(x, self.config.embd_pdrop, "embeddings")

    def rope_settings(self):
        return {}


@register_module(TaskType.CAUSAL_LM, config=GPT2Config, model_type="gpt2")
class GPT2LMHeadModel(CausalLM):
    """GPT2 with a language-model head."""

    body_class = GPT2Model

    WEIGHTS = renamed(
        {
            "model": "transformer",
            "embed_tokens": "wte",
            "embed_positions": "wpe",
            "layers": "h",
            "self_attn.o_proj": "attn.c_proj",
            "self_attn": "attn",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
            "mlp.up_proj": "mlp.c_fc",
            "mlp.down_proj": "mlp.c_proj",
            "norm": "ln_f",
        },
        *fused(("q_proj", "k_proj", "v_proj"), "c_attn", layout=equal),
        Rule("lm_head.kernel", "lm_head.weight", transpose),
        Rule("{path}.kernel", "{path}.weight", equal),
        *STANDARD,
        ignore("{path}.crossattention.bias"),
    )
