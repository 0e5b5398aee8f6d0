"""Layers with experts whose configuration fields several families share."""

from __future__ import annotations

from ed_infra.config import EasyDeLBaseConfig
from ed_layers.mlp import GatedMLP
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts


def has_experts(config: EasyDeLBaseConfig, index: int) -> bool:
    """Return whether a layer of a Qwen model has experts: every `decoder_sparse_step`-th layer
    that `mlp_only_layers` does not name."""
    often = (index + 1) % config.decoder_sparse_step == 0
    return often and config.num_experts > 0 and index not in config.mlp_only_layers


def qwen_experts(parts: Parts) -> SparseMLP:
    """Create the experts of Qwen2-MoE and its successors: scores are a softmax, and a shared
    expert has a separate gate."""
    config = parts.config
    experts, k = config.num_experts, config.num_experts_per_tok
    return SparseMLP(
        parts,
        gate=Router(parts, experts, k, normalize=getattr(config, "norm_topk_prob", True)),
        experts=Experts(parts, experts, config.moe_intermediate_size),
        shared=GatedMLP(parts, config.shared_expert_intermediate_size),
        shared_gate=True,
    )


def sigmoid_router(parts: Parts) -> Router:
    """The router of DeepSeek-V3 and its heirs: scores are sigmoids, a bias that training moves
    without a gradient joins in the choice, which is limited to the best groups."""
    config = parts.config
    return Router(
        parts,
        getattr(config, "n_routed_experts", None) or config.num_local_experts,
        config.num_experts_per_tok,
        score="sigmoid",
        normalize=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        selection_bias=True,
        groups=config.n_group,
        groups_chosen=config.topk_group,
    )


def sigmoid_experts(parts: Parts) -> SparseMLP:
    """Experts behind a `sigmoid_router`, some of them shared (DeepSeek-V3)."""
    config = parts.config
    experts = getattr(config, "n_routed_experts", None) or config.num_local_experts
    f = config.moe_intermediate_size
    return SparseMLP(
        parts,
        gate=sigmoid_router(parts),
        experts=Experts(parts, experts, f),
        shared=GatedMLP(parts, f * config.n_shared_experts),
    )
