"""RWKV-4 (Peng et al. 2023): no attention, but a mean of all values whose weights decay.

- a layer reads mixtures of each token and the one before it
- layer norms with biases; one more after the embedding

Numbers follow Hugging Face's `modeling_rwkv.py`; parameter names are its names. `rescale_every`
halves activations to keep float16 in its range when `transformers` infers; it changes nothing here.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.outputs import LayerReport
from ed_infra.registry import register_config, register_module
from ed_layers.cache.protocol import StateCache
from ed_layers.cache.spec import RecurrentSpec
from ed_layers.cache.storage import Layer
from ed_layers.context import Ctx
from ed_layers.parts import Parts
from ed_layers.recurrence.rows import Rows
from ed_layers.recurrence.rwkv import ChannelMixing, TimeMixing
from flax import nnx

from ed_models.body.decoder import Decoder
from ed_models.body.layers import Stream
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, renamed


@register_config("rwkv")
class RwkvConfig(EasyDeLBaseConfig, transformers.RwkvConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "rwkv"


class RwkvBlock(nnx.Module):
    """Time mixing and channel mixing, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: RwkvConfig = parts.config
        norm = partial(parts.layer_norm, config.hidden_size, eps=config.layer_norm_epsilon)
        self.ln1, self.ln2 = norm(), norm()
        self.attention = TimeMixing(parts, config.attention_hidden_size)
        self.feed_forward = ChannelMixing(parts, config.intermediate_size)

    def __call__(
        self, x: Stream, ctx: Ctx, cache: StateCache | None, layer: Layer
    ) -> tuple[Stream, StateCache | None, LayerReport]:
        spec = self.cache_specs()
        rows = Rows.of(ctx, (x.shape[0], x.shape[1]), cache)
        states = rows.states(cache, layer, spec)
        added, first = self.attention(self.ln1(x), states, rows)
        x = ctx.name_activation(x + added, "residual")
        added, second = self.feed_forward(self.ln2(x), states, rows)
        return x + added, rows.store(cache, layer, {**first, **second}, spec), LayerReport()

    def cache_specs(self) -> RecurrentSpec:
        return RecurrentSpec((*self.attention.states, *self.feed_forward.states))


class RwkvModel(Decoder):
    """Embedding, a norm, blocks, a norm."""

    config_class = RwkvConfig
    layer_class = RwkvBlock

    def add_parts(self, parts):
        config = self.config
        self.pre_ln = parts.layer_norm(config.hidden_size, eps=config.layer_norm_epsilon)

    @staticmethod
    def final_norm(parts):
        return parts.layer_norm(parts.config.hidden_size, eps=1e-5)

    def enter(self, x, ctx):
        return self.pre_ln(x)

    def rope_settings(self):
        return {}


@register_module(TaskType.CAUSAL_LM, config=RwkvConfig, model_type="rwkv")
class RwkvForCausalLM(CausalLM):
    """RWKV-4 with a language-model head."""

    body_class = RwkvModel
    WEIGHTS = renamed(
        {
            "model.pre_ln": "rwkv.blocks.0.pre_ln",
            "model.embed_tokens": "rwkv.embeddings",
            "model.norm": "rwkv.ln_out",
            "model.layers": "rwkv.blocks",
            "lm_head": "head",
        },
        *STANDARD,
    )
