"""The execution fields of a configuration as a `TypedDict`, for mappings that become one."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from ed_infra.enums import (
    AVAILABLE_ATTENTION_MECHANISMS,
    AVAILABLE_GRADIENT_CHECKPOINT_TARGETS,
    AVAILABLE_MOE_METHODS,
)
from ed_infra.sharding.axes import PartitionAxis
from ed_infra.specs import BaseOperationConfig, EasyDeLQuantizationConfig


class EasyDeLBaseConfigDict(TypedDict, total=False):
    """Keywords of `EasyDeLBaseConfig`: `EasyDeLBaseConfig(**values)`.

    `ed_infra.config.fields` describes the fields. A test compares names and types with that table.
    """

    sharding_axis_dims: tuple[int, ...]
    sharding_axis_names: tuple[str, ...]
    sharding_dcn_axis_dims: tuple[int, ...] | None
    partition_axis: PartitionAxis
    sharding_rules: tuple[tuple[str, tuple[Any, ...]], ...] | None
    use_sharding_constraint: bool
    sequence_axis_name: str
    backend: str | None
    platform: str | None
    native_kernels: bool
    batch_invariant: bool
    mtp_head: Literal["stored", "new"] | None
    easy_method: Literal["train", "serve", "convert"]
    attn_mechanism: AVAILABLE_ATTENTION_MECHANISMS
    decode_attn_mechanism: AVAILABLE_ATTENTION_MECHANISMS | None
    blocksize_q: int | None
    blocksize_k: int | None
    blocksize_b: int
    attn_dtype: str | None
    attn_softmax_dtype: str
    kvdtype: str | None
    scan_ring_attention: bool
    flash_attention_backward_pass_impl: Literal["triton", "xla"]
    precompute_masks: bool
    mask_max_position_embeddings: int | None
    freq_max_position_embeddings: int | None
    fcm_min_ratio: float
    fcm_max_ratio: float
    scan_layers: bool
    use_scan_mlp: bool
    scan_mlp_chunk_size: int
    gradient_checkpointing: str
    gradient_checkpointing_targets: tuple[AVAILABLE_GRADIENT_CHECKPOINT_TARGETS, ...] | None
    quantization_config: EasyDeLQuantizationConfig | dict[str, Any] | None
    kv_cache_quantization_config: EasyDeLQuantizationConfig | None
    bits: Literal[4, 8] | None
    use_sharded_kv_caching: bool
    kv_cache_sharding_sequence_axis_name: str | tuple[str, ...]
    moe_method: AVAILABLE_MOE_METHODS
    moe_tiling_size_batch: int
    moe_tiling_size_seqlen: int
    moe_tiling_size_dim: int
    moe_force_xla_gmm: bool
    router_z_loss_coef: float
    router_bias_rate: float
    expert_capacity_factor: float | None
    use_expert_tensor_mode: bool
    use_ring_of_experts: bool
    fsdp_is_ep_bound: bool
    sp_is_ep_bound: bool
    hardware_abstraction: bool
    pallas_m_block_size: int
    pallas_k_block_size: int
    pallas_n_block_size: int
    operation_configs: dict[str, BaseOperationConfig] | None
