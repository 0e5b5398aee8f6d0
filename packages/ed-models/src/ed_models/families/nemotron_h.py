"""Nemotron-H and Nemotron 3 (NVIDIA 2025): a layer is one mixer, of Mamba-2, attention or MLP.

- `layers_block_type` selects: `linear_attention`, `full_attention`, `mlp` or `moe`; attention
  has no positions
- feed-forwards have no gate; experts too, and they may read a smaller projection of the stream
- scores of experts are sigmoids; a bias that training moves without a gradient joins in the choice

Numbers follow Hugging Face's `modeling_nemotron_h.py`; parameter names are its names. Layers that
predict further tokens are not loaded.
"""

from __future__ import annotations

from functools import partial

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.mlp import MLP
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import SparseMLP
from ed_layers.parts import Parts
from ed_layers.recurrence.mamba2 import Mamba2Mixer
from flax import nnx

from ed_models.adapters.peft_layout import Modules
from ed_models.body.experts import sigmoid_router
from ed_models.body.layers import MixerLayer
from ed_models.body.mamba import MixerDecoder
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import BACKBONE, EXPERTS, MAMBA2, Rule, carry, renamed, transpose


@register_config("nemotron_h")
class NemotronHConfig(EasyDeLBaseConfig, transformers.NemotronHConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "nemotron_h"


class LatentExperts(nnx.Module):
    """Experts that read a projection of the stream."""

    def __init__(self, parts: Parts, features: int):
        config: NemotronHConfig = parts.config
        d, bias = config.hidden_size, config.mlp_bias
        self.fc1_latent_proj = parts.linear(d, features, axes=("embed", None), bias=bias)
        self.experts = build_experts(parts, features)
        self.fc2_latent_proj = parts.linear(features, d, axes=(None, "embed"), bias=bias)

    def __call__(self, x, expert_ids, weights, ctx):
        latent = self.experts(self.fc1_latent_proj(x, ctx), expert_ids, weights, ctx)
        return self.fc2_latent_proj(latent, ctx)


def build_experts(parts: Parts, features: int) -> Experts:
    """Create experts without a gate; `features` is the size of their inputs and outputs."""
    config: NemotronHConfig = parts.config
    return Experts(
        parts,
        config.n_routed_experts,
        config.moe_intermediate_size,
        hidden_act=config.mlp_hidden_act,
        gated=False,
        features=features,
    )


class NemotronHBlock(MixerLayer):
    """A mixer, normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        make = {
            "linear_attention": self.mamba,
            "full_attention": partial(SelfAttention, position=None),
            "mlp": self.mlp,
            "moe": self.sparse,
        }[parts.config.layers_block_type[index]]
        super().__init__(parts, mixer=make(parts))

    @staticmethod
    def mamba(parts: Parts) -> Mamba2Mixer:
        """The recurrence; steps have a lower bound and no upper one."""
        config: NemotronHConfig = parts.config
        return Mamba2Mixer(
            parts,
            heads=config.mamba_num_heads,
            head_dim=config.mamba_head_dim,
            states=config.ssm_state_size,
            groups=config.n_groups,
            taps=config.conv_kernel,
            bias=config.use_bias,
            conv_bias=config.use_conv_bias,
            norm_eps=config.layer_norm_epsilon,
            hidden_act=config.mamba_hidden_act,
            dt_limits=(config.time_step_min, float("inf")),
            time_step=(config.time_step_min, config.time_step_max, config.time_step_floor),
        )

    @staticmethod
    def mlp(parts: Parts, features: int | None = None) -> MLP:
        """A feed-forward without a gate."""
        config: NemotronHConfig = parts.config
        return MLP(parts, features, hidden_act=config.mlp_hidden_act, bias=config.mlp_bias)

    @classmethod
    def sparse(cls, parts: Parts) -> SparseMLP:
        """The layer with experts."""
        config: NemotronHConfig = parts.config
        latent = config.moe_latent_size
        return SparseMLP(
            parts,
            gate=sigmoid_router(parts),
            experts=LatentExperts(parts, latent)
            if latent
            else build_experts(parts, config.hidden_size),
            shared=cls.mlp(parts, config.moe_shared_expert_intermediate_size),
        )


class NemotronHModel(MixerDecoder):
    """Embedding, mixers, final norm."""

    config_class = NemotronHConfig
    layer_class = NemotronHBlock

    @staticmethod
    def layer_kinds(config):
        return config.layers_block_type

    @staticmethod
    def build_norm(parts):
        return partial(parts.norm, eps=parts.config.layer_norm_epsilon, scale_first=True)

    def enter(self, x, ctx):
        return x


@register_module(TaskType.CAUSAL_LM, config=NemotronHConfig, model_type="nemotron_h")
class NemotronHForCausalLM(CausalLM):
    """Nemotron-H with a language-model head."""

    body_class = NemotronHModel
    WEIGHTS = (
        *renamed(
            {
                **BACKBONE,
                "experts.experts": "experts",
                "experts.fc1_latent_proj": "fc1_latent_proj",
                "experts.fc2_latent_proj": "fc2_latent_proj",
            },
            # Not one of the experts, of which there are many.
            Rule("{path}.fc1_latent_proj.kernel", "{path}.fc1_latent_proj.weight", transpose),
            Rule("{path}.fc2_latent_proj.kernel", "{path}.fc2_latent_proj.weight", transpose),
            EXPERTS,
            *MAMBA2,
        ),
        carry("mtp.{path}"),
    )
    MODULES = Modules({"backbone": "model"})
