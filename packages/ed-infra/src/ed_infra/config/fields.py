"""The execution fields of every configuration: name, type, default and meaning, in one table.

`ExecutionFields` is the table, and `EasyDeLBaseConfig` inherits it. Execution fields define how a
model runs; its family defines architecture fields such as `hidden_size`. This module imports
neither jax nor transformers, so the YAML runner validates a section `base_config` quickly.
"""

# ruff: noqa: RUF009 - `option` declares a field with its documentation, as `field` would
from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ed_infra.dtypes import canonical_float
from ed_infra.enums import (
    AVAILABLE_ATTENTION_MECHANISMS,
    AVAILABLE_GRADIENT_CHECKPOINT_TARGETS,
    AVAILABLE_MOE_METHODS,
    MECHANISM_ALIASES,
    MOE_METHOD_ALIASES,
    EasyDeLBackends,
    EasyDeLGradientCheckPointers,
    EasyDeLPlatforms,
)
from ed_infra.errors import ConfigError, MeshError, did_you_mean, unknown_name
from ed_infra.options import Count, Fraction, NotNegative, NumbersAreNumbers, Positive
from ed_infra.sharding.axes import (
    AXIS_NAMES,
    PartitionAxis,
    check_axis_names,
    check_sizes,
    find_idle_axes,
    split_mesh_axes,
    total_sizes,
)
from ed_infra.specs import (
    KV_CACHE_FORMATS,
    OPERATION_FIELD_ALIASES,
    QUANTIZATION_FIELD_ALIASES,
    QUANTIZATION_FORMATS,
    STORED_CACHE_FORMATS,
    BaseOperationConfig,
    EasyDeLQuantizationConfig,
    from_mapping,
)


def option(default: object, doc: str) -> Any:
    """Declare one field of the table."""
    return dataclasses.field(default=default, metadata={"doc": doc})


@dataclasses.dataclass(kw_only=True, repr=False, eq=False)
class ExecutionFields:
    """Sharding, kernels, precision and memory of a model; equal for every family."""

    sharding_axis_dims: tuple[int, ...] = option(
        (1, -1, 1, 1, 1),
        "devices along (dp, fsdp, ep, tp, sp); one entry may be -1 for all remaining devices",
    )
    sharding_axis_names: tuple[str, ...] = option(
        AXIS_NAMES,
        "names of the mesh axes; other names replace dp, fsdp, ep, tp, sp in this order, or split "
        "the dimensions that partition_axis assigns to them",
    )
    sharding_dcn_axis_dims: tuple[int, ...] | None = option(
        None, "slices along each axis, for meshes over a data-center network"
    )
    partition_axis: PartitionAxis = option(
        PartitionAxis(), "the mesh axes over which each kind of dimension is split"
    )
    sharding_rules: tuple[tuple[str, tuple[Any, ...]], ...] | None = option(
        None, "(regular expression, partition spec) pairs that override the derived sharding"
    )
    use_sharding_constraint: bool = option(
        False, "constrain the sharding of activations inside layers in addition to layer outputs"
    )
    sequence_axis_name: str = option("sp", "mesh axis of sequence parallelism")
    backend: str | None = option(None, "jax backend of the mesh; None = the default backend")
    platform: str | None = option(
        None,
        "language of attention kernels: jax (plain XLA), triton or pallas, with an error if "
        "attn_mechanism has no such kernel; None = the best available one",
    )
    native_kernels: bool = option(
        True,
        "use the C++ kernels on CPUs if they are built; False = plain XLA (for a whole process: "
        "ED_LAYERS_NATIVE=0)",
    )
    batch_invariant: bool = option(
        False,
        "compute every sum in one order, so that equal tokens and weights give the same bits in "
        "every batch and on every mesh; needs the C++ kernels of CPUs",
    )
    mtp_head: Literal["stored", "new"] | None = option(
        None,
        "load the layer of a causal language model that predicts the token after the next one "
        "(the tensors mtp.*), for drafts and for trainer.mtp_loss_weight; new = with random values "
        "if the checkpoint has none; None = the tensors are only copied to saved checkpoints",
    )
    easy_method: Literal["train", "serve", "convert"] = option(
        "train", "workflow of the model; serve and convert store no values for gradients"
    )

    attn_mechanism: AVAILABLE_ATTENTION_MECHANISMS = option("auto", "attention mechanism")
    decode_attn_mechanism: AVAILABLE_ATTENTION_MECHANISMS | None = option(
        None,
        "attention mechanism that reads the cache of generate; None = attn_mechanism for prompts, "
        "vanilla or (long, split or quantized rows) autoregressive_decodeattn for single tokens",
    )
    blocksize_q: Count | None = option(
        None, "query block of attention kernels; None = the default of the kernel"
    )
    blocksize_k: Count | None = option(
        None, "key block of attention kernels; None = the default of the kernel"
    )
    blocksize_b: Count = option(
        1,
        "batch block of attention kernels, in sequences; flash_attn2 on TPUs reads it",
    )
    attn_dtype: str | None = option(
        None, "dtype of attention; None = the computation dtype of the model"
    )
    attn_softmax_dtype: str = option("float32", "dtype of the softmax in attention")
    kvdtype: str | None = option(None, "dtype of the KV cache; None = attn_dtype")
    scan_ring_attention: bool = option(True, "loop over ring steps instead of unrolling them")
    flash_attention_backward_pass_impl: Literal["triton", "xla"] = option(
        "triton", "backward pass of flash attention on GPUs: a kernel, or plain XLA"
    )
    precompute_masks: bool = option(True, "build the causal mask once instead of in each layer")
    mask_max_position_embeddings: Count | None = option(
        None, "positions that masks cover; None = max_position_embeddings"
    )
    freq_max_position_embeddings: Count | None = option(
        None, "positions that rotary tables cover; None = max_position_embeddings"
    )
    fcm_min_ratio: Fraction = option(
        0.0, "smallest fraction of keys, between 0 and 1, that forgetful causal masking drops"
    )
    fcm_max_ratio: Fraction = option(
        0.0,
        "largest fraction of keys, between 0 and 1, that forgetful causal masking drops; 0 = no "
        "masking",
    )

    scan_layers: bool = option(
        True,
        "run layers of equal structure as one compiled body over stacked parameters; on "
        "one CPU, the default of run files and of `esurge serve` is false, and on GPUs that of "
        "`esurge serve` and of run files without a trainer",
    )
    use_scan_mlp: bool = option(False, "compute the MLP in chunks of the sequence")
    scan_mlp_chunk_size: Count = option(1024, "positions of a chunk of the MLP")
    gradient_checkpointing: str = option(
        "", "policy for the values that are stored for the backward pass; empty = all"
    )
    gradient_checkpointing_targets: tuple[AVAILABLE_GRADIENT_CHECKPOINT_TARGETS, ...] | None = (
        option(None, "names of values that a policy by name stores or excludes")
    )

    quantization_config: EasyDeLQuantizationConfig | dict[str, Any] | None = option(
        None, "quantization of linear layers; a mapping with quant_method has Hugging Face's format"
    )
    kv_cache_quantization_config: EasyDeLQuantizationConfig | None = option(
        None, "quantization of the KV cache: int8 or fp8"
    )
    bits: Literal[4, 8] | None = option(
        None, "shorthand for quantization_config: 4 = nf4, 8 = int8"
    )
    use_sharded_kv_caching: bool = option(False, "also shard the KV cache along the sequence")
    kv_cache_sharding_sequence_axis_name: str | tuple[str, ...] = option(
        "sp", "mesh axes over which the sequence of a sharded KV cache is split"
    )

    moe_method: AVAILABLE_MOE_METHODS = option("fused_moe", "implementation of expert layers")
    moe_tiling_size_batch: Count = option(4, "batch tile of expert kernels")
    moe_tiling_size_seqlen: Count = option(128, "sequence tile of expert kernels")
    moe_tiling_size_dim: Count = option(128, "hidden tile of expert kernels")
    moe_force_xla_gmm: bool = option(
        False, "use XLA's grouped matrix product for fused_moe on CPUs too, although it is slow"
    )
    router_z_loss_coef: NotNegative = option(
        0.0, "weight of the router z-loss: the mean squared log-normalizer of the routers"
    )
    router_bias_rate: NotNegative = option(
        1e-3, "step size of the selection bias of trained routers; 0 = no update"
    )
    expert_capacity_factor: Positive | None = option(
        None,
        "capacity of an expert for the tokens of a row in training, relative to an equal share; "
        "None = unlimited",
    )
    use_expert_tensor_mode: bool = option(
        False, "shard whole experts over tp instead of the matrices of each expert"
    )
    use_ring_of_experts: bool = option(False, "route tokens to experts in a ring")
    fsdp_is_ep_bound: bool = option(
        True, "also shard experts over fsdp, if their number is divisible"
    )
    sp_is_ep_bound: bool = option(True, "also shard experts over sp, if their number is divisible")

    hardware_abstraction: bool = option(False, "use this project's own kernels where they exist")
    pallas_m_block_size: Count = option(128, "M block of Pallas matrix products")
    pallas_k_block_size: Count = option(128, "K block of Pallas matrix products")
    pallas_n_block_size: Count = option(128, "N block of Pallas matrix products")
    operation_configs: dict[str, BaseOperationConfig] | None = option(
        None, "kernel settings by operation name"
    )


class Field(typing.NamedTuple):
    """One row of the table."""

    name: str
    type: Any
    default: object
    doc: str


def _table() -> dict[str, Field]:
    types = typing.get_type_hints(ExecutionFields, include_extras=True)
    return {
        f.name: Field(f.name, types[f.name], f.default, f.metadata["doc"])
        for f in dataclasses.fields(ExecutionFields)
    }


#: Key of config.json that contains the execution fields.
SECTION = "easydel"
#: Name -> row, in the order of the table.
FIELDS: dict[str, Field] = _table()

#: Other spelling of a field -> its name.
FIELD_ALIASES: dict[str, str] = {
    "attention_mechanism": "attn_mechanism",
    "gradient_checkpointing_policy": "gradient_checkpointing",
    "use_hardware_abstraction": "hardware_abstraction",
    "scan_attention_layers": "scan_layers",
    "axis_dims": "sharding_axis_dims",
    "axis_names": "sharding_axis_names",
    "dcn_axis_dims": "sharding_dcn_axis_dims",
}

_OF_EXPERTS = "XLA computes the products of experts and selects their tiles: omit it"
_OF_PALLAS = (
    "XLA computes matrix products and selects their blocks: omit it; blocksize_q and blocksize_k "
    "are the blocks of attention"
)
#: Field that no package reads in this version -> what to set instead; setting one causes a warning.
#: Remove a field when it gets an effect.
WITHOUT_EFFECT: dict[str, str] = {
    "hardware_abstraction": (
        "this project's own kernels are used wherever they exist: omit it, or set "
        "native_kernels: false (CPUs) or platform: jax (accelerators) to use XLA instead"
    ),
    "moe_tiling_size_batch": _OF_EXPERTS,
    "moe_tiling_size_dim": _OF_EXPERTS,
    "moe_tiling_size_seqlen": _OF_EXPERTS,
    "pallas_k_block_size": _OF_PALLAS,
    "pallas_m_block_size": _OF_PALLAS,
    "pallas_n_block_size": _OF_PALLAS,
}

#: Operations whose settings in `operation_configs` are read; other settings cause a warning.
OPERATIONS: frozenset[str] = frozenset(
    {
        "auto",
        "autoregressive_decodeattn",
        "blocksparse",
        "blockwise",
        "cudnn",
        "flash_attn2",
        "page_attention",
        "ragged_page_attention_v2",
        "ragged_page_attention_v3",
        "ring",
    }
)

_AXIS_SIZES = ("sharding_axis_dims", "sharding_dcn_axis_dims")
_SEQUENCE_AXES = ("sequence_axis_name", "kv_cache_sharding_sequence_axis_name")
_DTYPE_FIELDS = frozenset({"attn_dtype", "attn_softmax_dtype", "kvdtype"})
_NAMES: dict[str, tuple[str, list[str], Mapping[str, str]]] = {
    "attn_mechanism": (
        "attention mechanism",
        list(typing.get_args(AVAILABLE_ATTENTION_MECHANISMS)),
        MECHANISM_ALIASES,
    ),
    "moe_method": ("MoE method", list(typing.get_args(AVAILABLE_MOE_METHODS)), MOE_METHOD_ALIASES),
    "gradient_checkpointing": (
        "gradient checkpointing policy",
        [p.value for p in EasyDeLGradientCheckPointers],
        {"none": "", "NONE": ""},
    ),
    "backend": ("backend", [b.value for b in EasyDeLBackends], {"cuda": "gpu"}),
    "platform": ("platform", [p.value for p in EasyDeLPlatforms], {}),
    "easy_method": ("workflow", ["train", "serve", "convert"], {"eval": "serve"}),
}
_NAMES["decode_attn_mechanism"] = _NAMES["attn_mechanism"]
# Fields for which an empty value means None, as in EasyDeL's documentation.
_EMPTY_IS_NONE = frozenset({"backend", "platform", "decode_attn_mechanism"})


def canonical_field(name: str) -> str:
    """Return the canonical name of a field; unknown names are returned unchanged."""
    return FIELD_ALIASES.get(name, name)


def normalize_fields(name: str, value: object) -> Any:
    """Return the canonical form of a field's value.

    Aliases are replaced, dtypes become strings, lists become tuples, and mappings become the
    dataclasses of `ed_infra.specs`.

    Args:
        name: A key of `FIELDS`.
        value: A value in any form that the field accepts.

    Raises:
        ConfigError: The value has the wrong type or is not an allowed name.
    """
    if name == "partition_axis" and value is None:
        return PartitionAxis()
    if value == "" and name in _EMPTY_IS_NONE:
        value = None
    if value is None:
        pass
    elif name in _DTYPE_FIELDS:
        try:
            return canonical_float(value)
        except ConfigError as error:
            cache = "; for a quantized cache set kv_cache_quantization_config"
            raise ConfigError(f"{name}: {error}{cache if name == 'kvdtype' else ''}") from None
    elif name in _NAMES:
        kind, allowed_names, aliases = _NAMES[name]
        raw_value = getattr(value, "value", value)
        raw_value = aliases.get(raw_value, raw_value) if isinstance(raw_value, str) else raw_value
        if raw_value not in allowed_names:
            raise unknown_name(f"{kind} in {name}", value, [*filter(None, allowed_names), *aliases])
        return raw_value
    elif name == "partition_axis":
        return from_mapping(PartitionAxis, value)
    elif name == "sharding_rules":
        return _rules(value)
    elif name == "kv_cache_quantization_config":
        quantized: Any = from_mapping(EasyDeLQuantizationConfig, value, QUANTIZATION_FIELD_ALIASES)
        if quantized.dtype not in STORED_CACHE_FORMATS:
            raise ConfigError(
                f"{name}: dtype {quantized.dtype!r} is not for a cache of keys and values; choose "
                f"one of the 8-bit formats: {', '.join(KV_CACHE_FORMATS)}"
            )
        return quantized
    elif name == "quantization_config":
        if isinstance(value, Mapping) and "quant_method" in value:
            return dict(value)
        return from_mapping(EasyDeLQuantizationConfig, value, QUANTIZATION_FIELD_ALIASES)
    elif name == "operation_configs":
        if not isinstance(value, Mapping):
            raise ConfigError(f"operation_configs maps operations to settings, got {value!r}")
        return _operations(value)
    try:
        result = _adapter(name).validate_python(value)
        if name == "sharding_axis_names":
            check_axis_names(result)
        elif name in _AXIS_SIZES and result is not None:
            check_sizes(result)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        location = "".join(f"[{part}]" for part in problem["loc"] if isinstance(part, int))
        message = problem["msg"]
        raise ConfigError(f"{name}{location} = {value!r}: {message} ({FIELDS[name].doc})") from None
    except MeshError as error:
        raise MeshError(f"{name}: {error}") from None
    return result


def check_together(values: Mapping[str, Any]) -> None:
    """Check that fields do not contradict each other.

    Args:
        values: Field -> value in canonical form; missing fields have their defaults.

    Raises:
        ConfigError: Two fields contradict each other; the attribute `field` names one of them.
    """
    settings = {name: values.get(name, field.default) for name, field in FIELDS.items()}
    names = settings["sharding_axis_names"]
    for field in _AXIS_SIZES:
        dims = settings[field]
        if dims is not None and len(dims) != len(names):
            raise ConfigError(
                f"{field} = {dims} has {len(dims)} sizes for {len(names)} axes {names}",
                field=field,
            )
    sizes = total_sizes(*(settings[field] for field in _AXIS_SIZES))
    settings["partition_axis"].on(names, sizes)
    for field in _SEQUENCE_AXES:
        for axis in split_mesh_axes(settings[field]):
            # The default name refers to the axis at its position.
            if axis not in names and settings[field] != FIELDS[field].default:
                raise ConfigError(
                    f"{field}: the mesh has no axis {axis!r}{did_you_mean(axis, names)} ({names})",
                    field=field,
                )
    low, high = settings["fcm_min_ratio"], settings["fcm_max_ratio"]
    if low > high:
        raise ConfigError(
            f"fcm_min_ratio = {low} is above fcm_max_ratio = {high}: each batch draws between the "
            "two",
            field="fcm_min_ratio",
        )


def find_remarks(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield path, assignment and remark of each value without an effect, or with another one.

    Args:
        values: Field -> value in canonical form; missing fields have their defaults.
    """
    for name in sorted(WITHOUT_EFFECT):
        value = values.get(name, FIELDS[name].default)
        if value != FIELDS[name].default:
            yield (name,), f"{name} = {value!r}", f"has no effect: {WITHOUT_EFFECT[name]}"
    name, axis = "partition_axis", values.get("partition_axis", PartitionAxis())
    constrained = values.get("use_sharding_constraint", False)
    for field, reason in find_idle_axes(axis, constrained=constrained):
        assignment = f"{name}.{field} = {getattr(axis, field)!r}"
        yield (name, field), assignment, f"has no effect: {reason}"
    for operation in sorted(set(values.get("operation_configs") or ()) - OPERATIONS):
        reason = f"it has no kernel settings, which {', '.join(sorted(OPERATIONS))} have"
        assignment = f"operation_configs[{operation!r}]"
        yield ("operation_configs", operation), assignment, f"has no effect: {reason}"
    name, cache = "kv_cache_quantization_config", values.get("kv_cache_quantization_config")
    if cache is not None and QUANTIZATION_FORMATS[cache.dtype][0] < 8:
        stored = STORED_CACHE_FORMATS[cache.dtype]
        remark = f"is stored as {stored}: a cache of keys and values has no format of 4 bits"
        yield (name,), f"{name} = {cache.dtype}", remark


@functools.cache
def _adapter(name: str) -> TypeAdapter[Any]:
    kind: Any = Annotated[FIELDS[name].type, NumbersAreNumbers()]
    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))


def _operations(value: object) -> dict[str, BaseOperationConfig]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"operation_configs maps operations to settings, got {value!r}")
    allowed_names, aliases = _NAMES["attn_mechanism"][1:]
    result: dict[str, BaseOperationConfig] = {}
    for key, settings in value.items():
        name = aliases.get(key, key)
        if name not in allowed_names:
            raise unknown_name("operation in operation_configs", key, allowed_names)
        if name in result:
            raise ConfigError(f"operation_configs: {key!r} is another name of {name!r}: keep one")
        result[name] = from_mapping(BaseOperationConfig, settings, OPERATION_FIELD_ALIASES)
    return result


def _rules(value: Any) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    try:
        rules = tuple(
            (str(regex), tuple(tuple(a) if isinstance(a, list) else a for a in spec))
            for regex, spec in (value.items() if isinstance(value, Mapping) else value)
        )
    except (TypeError, ValueError):
        raise ConfigError(
            "sharding_rules must be pairs of a regular expression and a partition spec, such as "
            f"[['.*/kernel', ['fsdp', 'tp']]]; got {value!r}"
        ) from None
    for regex, _ in rules:
        try:
            re.compile(regex)
        except re.error as error:
            raise ConfigError(
                f"sharding_rules: {regex!r} is not a regular expression: {error}"
            ) from None
    return rules
