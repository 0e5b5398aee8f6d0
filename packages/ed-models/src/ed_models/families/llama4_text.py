"""Llama 4 (Meta 2025), the language model: one expert and a shared one, chunked attention.

- the sigmoid of the router's logit scales the input of the expert
- layers with rotary positions see their own chunk; the others see all, without positions, and their
  queries grow with their place (`attn_temperature_tuning`)
- queries and keys are normed, without weights, after they are turned; rotary pairs are neighbours
- `moe_layers` selects the layers with experts; dense ones have `intermediate_size_mlp`

Numbers follow Hugging Face's `modeling_llama4.py`; parameter names are its names. A row that is
padded on the left has the numbers of the row alone.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, QKNorm, Rotary
from ed_layers.mlp import GatedMLP
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.adapters.peft_layout import Modules
from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, Rule, equal, renamed, split


@register_config("llama4_text")
class Llama4TextConfig(EasyDeLBaseConfig, transformers.Llama4TextConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "llama4_text"


class Llama4TextAttention(SelfAttention):
    """Chunks and rotary positions, or neither and queries that grow with their place."""

    def __init__(self, parts: Parts, index: int):
        config: Llama4TextConfig = parts.config
        turns = bool(config.no_rope_layers[index])  # 1 = rotary positions, in spite of the name
        chunked = config.layer_types[index] == "chunked_attention"
        super().__init__(
            parts,
            bias=config.attention_bias,
            norm=QKNorm(
                partial(parts.norm, weight=False) if config.use_qk_norm and turns else None,
                last=True,
            ),
            position=Rotary(interleaved=True) if turns else None,
            mask=MaskRule(chunk=config.attention_chunk_size if chunked else None),
        )
        self.grows = config.attn_temperature_tuning and not turns
        self.step, self.growth = config.floor_scale, config.attn_scale

    def projected(self, x, ctx):
        q, k, v = super().projected(x, ctx)
        if self.grows:
            steps = jnp.floor((ctx.position_ids + 1.0) / self.step)
            scale = jnp.log1p(steps) * self.growth + 1.0
            q = (q * scale[:, :, None, None]).astype(q.dtype)
        return q, k, v


class Llama4TextDecoderLayer(DecoderLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: Llama4TextConfig = parts.config
        if index in config.moe_layers:
            mlp = self.sparse(parts)
        else:
            mlp = GatedMLP(parts, config.intermediate_size_mlp)
        super().__init__(parts, self_attn=Llama4TextAttention(parts, index), mlp=mlp)

    @staticmethod
    def sparse(parts: Parts) -> SparseMLP:
        """The layer with experts."""
        config: Llama4TextConfig = parts.config
        experts, k = config.num_local_experts, config.num_experts_per_tok
        return SparseMLP(
            parts,
            gate=Router(parts, experts, k, score="sigmoid", normalize=False),
            experts=Experts(parts, experts, config.intermediate_size),
            shared=GatedMLP(parts),
            scale_inputs=True,
        )


class Llama4TextModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Llama4TextConfig
    layer_class = Llama4TextDecoderLayer

    @staticmethod
    def layer_kinds(config):
        kinds = zip(config.layer_types, config.no_rope_layers, strict=False)
        return [(*kind, i in config.moe_layers) for i, kind in enumerate(kinds)]


@register_module(TaskType.CAUSAL_LM, config=Llama4TextConfig, model_type="llama4_text")
class Llama4TextForCausalLM(CausalLM):
    """Llama 4 with a language-model head."""

    body_class = Llama4TextModel
    WEIGHTS = renamed(
        {"mlp": "feed_forward", "gate": "router", "shared_experts": "shared_expert"},
        Rule(
            ("{path}.experts.gate_proj.kernel", "{path}.experts.up_proj.kernel"),
            "{path}.experts.gate_up_proj",
            split(-1, equal),
        ),
        Rule("{path}.experts.down_proj.kernel", "{path}.experts.down_proj", equal),
        *STANDARD,
    )
    MODULES = Modules(swapped=True)
