"""GPT-J (Wang & Komatsuzaki 2021): attention and feed-forward side by side behind one layer norm.

- rotary pairs are neighbours, the first `rotary_dim` dimensions of each head turn
- biases in the feed-forward and in the head, none in attention

Numbers follow Hugging Face's `modeling_gptj.py`; parameter names are its names.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
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
from ed_models.weights.rules import STANDARD, renamed


@register_config("gptj")
class GPTJConfig(EasyDeLBaseConfig, transformers.GPTJConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "gptj"
    attribute_map = {**transformers.GPTJConfig.attribute_map, "attention_dropout": "attn_pdrop"}


class GPTJDecoderLayer(ParallelLayer):
    """Attention and feed-forward side by side behind one norm."""

    def __init__(self, parts: Parts, index: int):
        config: GPTJConfig = parts.config
        size = config.n_inner or 4 * config.hidden_size
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, position=Rotary(interleaved=True)),
            mlp=MLP(parts, size, hidden_act=config.activation_function),
            dropout=config.resid_pdrop,
        )


class GPTJModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = GPTJConfig
    layer_class = GPTJDecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=parts.config.layer_norm_epsilon)

    def enter(self, x, ctx):
        return ctx.apply_dropout(x, self.config.embd_pdrop, "embeddings")

    def rope_settings(self):
        return {ALL_LAYERS: RopeSettings({}, head_dim=self.config.rotary_dim)}


@register_module(TaskType.CAUSAL_LM, config=GPTJConfig, model_type="gptj")
class GPTJForCausalLM(CausalLM):
    """GPTJ with a language-model head."""

    body_class = GPTJModel

    @property
    def head_bias(self):
        return True

    WEIGHTS = renamed(
        {
            "model": "transformer",
            "embed_tokens": "wte",
            "layers": "h",
            "self_attn": "attn",
            "o_proj": "out_proj",
            "input_layernorm": "ln_1",
            "mlp.up_proj": "mlp.fc_in",
            "mlp.down_proj": "mlp.fc_out",
            "norm": "ln_f",
        },
        *STANDARD,
    )
