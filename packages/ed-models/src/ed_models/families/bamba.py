"""Bamba (IBM, Princeton and UIUC 2024): Mamba-2 and attention.

- `attn_layer_indices` lists the layers with attention; rotary positions apply to half of each head
- the mean square of the logits' normalisers is an additional loss, times `z_loss_coefficient`

Numbers follow Hugging Face's `modeling_bamba.py`; parameter names are its names.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.outputs import Metric
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.losses import token_logprobs
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.body.mamba import hybrid_mixer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import MAMBA2, renamed


@register_config("bamba")
class BambaConfig(EasyDeLBaseConfig, transformers.BambaConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "bamba"


class BambaDecoderLayer(DecoderLayer):
    """Mamba-2 or attention, and a feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: BambaConfig = parts.config
        attends = config.layers_block_type[index] == "full_attention"
        attention = SelfAttention(parts, bias=config.attention_bias) if attends else None
        super().__init__(
            parts,
            self_attn=attention or hybrid_mixer(parts),
            name="self_attn" if attends else "mamba",
            mlp=GatedMLP(parts, bias=config.mlp_bias),
        )


class BambaModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = BambaConfig
    layer_class = BambaDecoderLayer

    @staticmethod
    def layer_kinds(config):
        return config.layers_block_type


@register_module(TaskType.CAUSAL_LM, config=BambaConfig, model_type="bamba")
class BambaForCausalLM(CausalLM):
    """Bamba with a language-model head."""

    body_class = BambaModel
    WEIGHTS = renamed(
        {
            "model.norm": "model.final_layernorm",
            "post_attention_layernorm": "pre_ff_layernorm",
            "mlp": "feed_forward",
        },
        *MAMBA2,
    )

    def __call__(self, *args, **inputs):
        output = super().__call__(*args, **inputs)
        factor = self.config.z_loss_coefficient
        if not factor or self.config.easy_method != "train" or output.past_key_values is not None:
            return output
        assert output.last_hidden_state is not None
        hidden = output.last_hidden_state.reshape(-1, self.config.hidden_size)
        _, logz = token_logprobs(hidden, self.head(), jnp.zeros(len(hidden), jnp.int32))
        segments = inputs.get("segment_ids")
        mask = inputs.get("attention_mask") if segments is None else segments
        real = jnp.ones(len(hidden)) if mask is None else jnp.ravel(mask != 0)
        loss = Metric.of(factor * jnp.sum(jnp.square(logz) * real), jnp.sum(real))
        return replace(output, losses={**output.losses, "logits_z": loss})
