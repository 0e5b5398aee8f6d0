"""Phi-3.5-MoE (Microsoft 2024): SparseMixer routing, layer norms.

- the weight of each of the two experts is its softmax among those whose logits are near the best
  remaining one (Liu et al. 2023); in training too the best ones are chosen, without noise
- layer norms with biases; the head may have one
- LongRoPE with a separate factor on cosine and sine (`short_mscale`, `long_mscale`)

Numbers follow Hugging Face's `modeling_phimoe.py`; parameter names are its names. Beyond the length
of training the long factors count, as Microsoft published the model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module
from ed_layers import sums
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP, given_or
from ed_layers.parts import Parts

from ed_models.adapters.peft_layout import Modules
from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import BLOCK_SPARSE


@register_config("phimoe")
class PhimoeConfig(EasyDeLBaseConfig, transformers.PhimoeConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "phimoe"


class PhimoeRouter(Router):
    """Two experts, one after the other: each weighed against those that come near it."""

    def __init__(self, parts: Parts):
        config: PhimoeConfig = parts.config
        if config.num_experts_per_tok != 2:
            raise ConfigError(
                f"num_experts_per_tok = {config.num_experts_per_tok}: phimoe chooses 2 experts",
                field="num_experts_per_tok",
            )
        super().__init__(parts, config.num_local_experts, 2)
        self.near = 2 * config.router_jitter_noise

    def choose(self, logits, forced_ids=None):
        remaining_logits, expert_ids, weights = logits, [], []
        for turn in range(2):
            one = jnp.argmax(remaining_logits, axis=-1, keepdims=True)
            one = given_or(None if forced_ids is None else forced_ids[..., turn : turn + 1], one)
            best = jnp.take_along_axis(remaining_logits, one, axis=-1)
            far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > self.near
            shares = sums.softmax(jnp.where(far, -jnp.inf, remaining_logits))
            expert_ids.append(one)
            weights.append(jnp.take_along_axis(shares, one, axis=-1))
            remaining_logits = jnp.where(
                jnp.arange(logits.shape[-1]) == one, -jnp.inf, remaining_logits
            )
        return jnp.concatenate(expert_ids, axis=-1), jnp.concatenate(weights, axis=-1)


class PhimoeDecoderLayer(DecoderLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: PhimoeConfig = parts.config
        mlp = SparseMLP(
            parts,
            gate=PhimoeRouter(parts),
            experts=Experts(parts, config.num_local_experts, config.intermediate_size),
        )
        attention = SelfAttention(
            parts, bias=config.attention_bias, mask=MaskRule(window=config.sliding_window)
        )
        super().__init__(parts, self_attn=attention, mlp=mlp)


class PhimoeModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = PhimoeConfig
    layer_class = PhimoeDecoderLayer

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=parts.config.rms_norm_eps)

    def rope_settings(self):
        def scale_settings(settings):
            parameters = dict(settings.parameters)
            short, long = (parameters.pop(f"{n}_mscale", None) for n in ("short", "long"))
            if short != long:
                raise ConfigError(
                    f"rope_parameters: short_mscale = {short} and long_mscale = {long} differ; "
                    "published models have one value for both, and others are not supported"
                )
            if short is not None:
                parameters["attention_factor"] = short
            return replace(settings, parameters=parameters)

        return {kind: scale_settings(s) for kind, s in super().rope_settings().items()}


@register_module(TaskType.CAUSAL_LM, config=PhimoeConfig, model_type="phimoe")
class PhimoeForCausalLM(CausalLM):
    """Phi-3.5-MoE with a language-model head."""

    body_class = PhimoeModel
    WEIGHTS = BLOCK_SPARSE
    MODULES = Modules({"block_sparse_moe": "mlp"})

    @property
    def head_bias(self):
        return self.config.lm_head_bias
