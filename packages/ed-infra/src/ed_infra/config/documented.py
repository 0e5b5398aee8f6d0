"""Methods of `EasyDeLBaseConfig` from EasyDeL's guide; the packages of this project do not use
them.

`ed_infra.config.base` binds each function as a method or property. `DocumentedFields` lists the
fields that they read. Models create rotary tables and masks in other modules; only `expert_axes` is
shared.
"""

from __future__ import annotations

import dataclasses
import math
import re
import secrets
from collections.abc import Sequence
from typing import Any, Final, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from ed_infra import masks
from ed_infra.errors import ConfigError
from ed_infra.rope import frequencies as rope
from ed_infra.rope.parameters import RopeSettings
from ed_infra.rope.rotation import RotaryTable, angles, get_section_axes
from ed_infra.sharding import mesh as meshes
from ed_infra.sharding.axes import PartitionAxis
from ed_infra.specs import AttnMaskDetail


class DocumentedFields(Protocol):
    """The fields of a configuration that these functions read."""

    sharding_axis_dims: tuple[int, ...]
    sharding_axis_names: tuple[str, ...]
    partition_axis: PartitionAxis
    backend: str | None
    fsdp_is_ep_bound: bool
    sp_is_ep_bound: bool
    use_expert_tensor_mode: bool
    precompute_masks: bool
    mask_max_position_embeddings: int | None
    freq_max_position_embeddings: int | None
    fcm_min_ratio: float
    fcm_max_ratio: float

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""
        ...


class NotGiven:
    """Type of `NOT_GIVEN`, which is false and equal only to itself."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "NOT_GIVEN"

    def __reduce__(self) -> str:
        return "NOT_GIVEN"


#: Default of an argument for which None is a valid value.
NOT_GIVEN: Final = NotGiven()


def set_attrs_smartly(self: object, attr_name: str, default: object, new_attr: object) -> None:
    """Set an attribute to `new_attr`; with `NOT_GIVEN`, set a missing attribute to `default`."""
    if new_attr is not NOT_GIVEN:
        setattr(self, attr_name, new_attr)
    elif not hasattr(self, attr_name):
        setattr(self, attr_name, default)


def extract_commit_hash(resolved_file: str | None, commit_hash: str | None) -> str | None:
    """Return the commit of a file in the Hugging Face cache.

    Args:
        resolved_file: A path of the form `.../snapshots/<commit>/...`.
        commit_hash: The commit, if it is known; it is returned unchanged.

    Returns:
        40 hexadecimal digits, or None if the path contains no commit.
    """
    if commit_hash is not None or resolved_file is None:
        return commit_hash
    match = re.search(r"snapshots/([0-9a-f]{40})(?:/|$)", str(resolved_file).replace("\\", "/"))
    return match.group(1) if match else None


class ModuleCaches(nnx.Cache):
    """A precomputed array that supports the operations of an array.

    As an attribute of a module it is no parameter, so optimizers and checkpoints of parameters
    ignore it (`module.graphother` contains it).
    """


def _on_mesh(value: jax.Array, mesh: Mesh) -> ModuleCaches:
    """Replicate an array over the devices of a mesh."""
    if mesh.size > 1:
        value = jax.device_put(value, NamedSharding(mesh, PartitionSpec()))
    with nnx.use_eager_sharding(False):
        return ModuleCaches(value)


# --- meshes ---------------------------------------------------------------------------------------


def jax_mesh(self: DocumentedFields) -> Mesh:
    """Return `mesh`."""
    return self.mesh


def create_mesh(
    sharding_axis_dims: Sequence[int] | None = None,
    sharding_axis_names: Sequence[str] | None = None,
    sharding_dcn_axis_dims: Sequence[int] | None = None,
    process_is_granule: bool = False,
    should_sort_granules_by_key: bool = True,
    allow_split_physical_axes: bool = True,
    backend: str | None = None,
    *,
    axis_dims: Sequence[int] | None = None,
    axis_names: Sequence[str] | None = None,
) -> Mesh:
    """Create a mesh with `ed_infra.sharding.mesh.create_mesh`.

    `axis_dims` and `axis_names` are aliases.
    """
    for name, value, alias in (
        ("axis_dims", sharding_axis_dims, axis_dims),
        ("axis_names", sharding_axis_names, axis_names),
    ):
        if value is not None and alias is not None:
            raise ConfigError(f"create_mesh got sharding_{name} and {name}: keep one")
    dims = sharding_axis_dims if sharding_axis_dims is not None else axis_dims
    names = sharding_axis_names if sharding_axis_names is not None else axis_names
    return meshes.create_mesh(
        dims if dims is not None else (1, -1, 1, 1, 1),
        names if names is not None else meshes.AXIS_NAMES,
        sharding_dcn_axis_dims,
        backend=backend,
        process_is_granule=process_is_granule,
        should_sort_granules_by_key=should_sort_granules_by_key,
        allow_split_physical_axes=allow_split_physical_axes,
    )


def expert_axes(self: DocumentedFields, axes: PartitionAxis) -> list[str]:
    """Return the mesh axes over which experts are split in addition to `expert_axis`."""
    bound = {
        axes.fully_sharded_data_parallel_axis: self.fsdp_is_ep_bound,
        axes.sequence_parallel_axis: self.sp_is_ep_bound,
        axes.tensor_parallel_axis: self.use_expert_tensor_mode,
    }
    return [name for name, is_bound in bound.items() if is_bound]


def expert_mesh(self: DocumentedFields, kind: AxisType = AxisType.Explicit) -> Mesh:
    """Return a mesh with the explicit axes (dp, ep, tp).

    `fsdp_is_ep_bound` and `sp_is_ep_bound` merge fsdp and sp into ep instead of dp.
    """
    mesh = self.mesh
    axes = self.partition_axis.on(mesh.axis_names, mesh.shape)
    dp, fsdp = axes.data_parallel_axis, axes.fully_sharded_data_parallel_axis
    ep, tp, sp = axes.expert_parallel_axis, axes.tensor_parallel_axis, axes.sequence_parallel_axis
    names = list(mesh.axis_names)
    if sorted(names) != sorted((dp, fsdp, ep, tp, sp)):
        raise ConfigError(
            f"an expert mesh needs the axes {(dp, fsdp, ep, tp, sp)}, and this mesh has {names}"
        )
    expert = [fsdp] * self.fsdp_is_ep_bound + [ep] + [sp] * self.sp_is_ep_bound
    groups = [[name for name in (dp, fsdp, sp) if name not in expert], expert, [tp]]
    order = [names.index(name) for group in groups for name in group]
    shape = [math.prod(mesh.shape[name] for name in group) for group in groups]
    devices = mesh.devices.transpose(order).reshape(shape)
    return Mesh(devices, ("dp", "ep", "tp"), axis_types=(kind,) * 3)


def auto_expert_mesh(self: DocumentedFields) -> Mesh:
    """Return `expert_mesh` with automatic axes."""
    return expert_mesh(self, AxisType.Auto)


def expert_abstract_mesh(self: DocumentedFields) -> AbstractMesh:
    """Return `expert_mesh` without devices."""
    return expert_mesh(self).abstract_mesh


def get_axis_dims(self: DocumentedFields) -> Sequence[int]:
    """Return `sharding_axis_dims`."""
    return self.sharding_axis_dims


def get_axis_names(self: DocumentedFields) -> Sequence[str]:
    """Return `sharding_axis_names`."""
    return self.sharding_axis_names


def get_backend(self: DocumentedFields) -> str:
    """Return the backend, or the default backend of jax if it is unset."""
    return self.backend or jax.default_backend()


# --- positions ------------------------------------------------------------------------------------


def get_mask_details(self: DocumentedFields) -> dict[int, AttnMaskDetail] | None:
    """Return the attention pattern of each layer, or None if all layers have full attention.

    Follows `layer_types` with `sliding_window` or `attention_chunk_size`, as transformers does.
    """
    kinds = getattr(self, "layer_types", None)
    if not kinds:
        return None
    sizes = {
        "sliding_attention": ("sliding", getattr(self, "sliding_window", None)),
        "chunked_attention": ("chunked", getattr(self, "attention_chunk_size", None)),
    }
    return {
        layer: AttnMaskDetail(*sizes[kind])
        if kind in sizes and sizes[kind][1]
        else AttnMaskDetail()
        for layer, kind in enumerate(kinds)
    }


def granted_freq_max_position_embedding(self: DocumentedFields) -> int:
    """Return the number of positions of rotary tables."""
    return _positions(self, "freq_max_position_embeddings")


def granted_mask_max_position_embedding(self: DocumentedFields) -> int:
    """Return the number of positions of precomputed masks."""
    return _positions(self, "mask_max_position_embeddings")


def _positions(self: DocumentedFields, field: str) -> int:
    value = getattr(self, field) or getattr(self, "max_position_embeddings", None)
    if value is None:
        raise ConfigError(f"neither {field} nor max_position_embeddings is set")
    return value


def get_basic_inv_frequencies(
    self: DocumentedFields,
    head_size: int | None = None,
    rotary_dim: int | None = None,
    base: float | None = None,
    partial_rotary_factor: float | None = None,
    *,
    layer_type: str | None = None,
) -> ModuleCaches:
    """Return the inverse rotary frequencies of this configuration: float32 [r / 2].

    Args:
        head_size: k; the default is `head_dim`.
        rotary_dim: r; the default follows from `rope_parameters`, otherwise `head_size`.
        base: Base of the frequencies; the default is `rope_theta`.
        partial_rotary_factor: r / k, instead of `rotary_dim`.
        layer_type: Layer type, if `rope_parameters` has an entry for each one.
    """
    settings = _rope(self, head_size, rotary_dim, base, partial_rotary_factor, layer_type)
    return _on_mesh(jnp.asarray(rope.inv_frequencies(settings)[0]), self.mesh)


def get_basic_frequencies(
    self: DocumentedFields,
    head_size: int | None = None,
    rotary_dim: int | None = None,
    base: float | None = None,
    max_position_embeddings: int | None = None,
    *,
    layer_type: str | None = None,
) -> ModuleCaches:
    """Return the concatenated cos and sin tables on the mesh: float32 [positions, r]."""
    length = max_position_embeddings or granted_freq_max_position_embedding(self)
    settings = _rope(self, head_size, rotary_dim, base, None, layer_type)
    frequencies, scaling = rope.inv_frequencies(settings, seq_len=length)
    table = angles(jnp.arange(length), frequencies, scaling)
    return _on_mesh(jnp.concatenate(table, axis=-1), self.mesh)


def get_basic_rope(
    self: DocumentedFields,
    dtype: DTypeLike = jnp.float32,
    head_size: int | None = None,
    rotary_dim: int | None = None,
    is_neox_style: bool = True,
    base: float | None = None,
    max_position_embeddings: int | None = None,
    *,
    layer_type: str | None = None,
) -> RotaryTable:
    """Return a rotary embedding: a function of (query, key, positions) that unpacks to `sin, cos`.

    With `mrope_section` in `rope_parameters`, positions may have a leading dimension for the axes
    of images and videos: [a, ..., s].
    """
    length = max_position_embeddings or granted_freq_max_position_embedding(self)
    settings = _rope(self, head_size, rotary_dim, base, None, layer_type)
    frequencies, scaling = rope.inv_frequencies(settings, seq_len=length)
    axis = get_section_axes(settings.parameters, len(frequencies))
    return RotaryTable(frequencies, scaling, length, not is_neox_style, dtype, axis)


def _rope(
    self: DocumentedFields,
    head_size: int | None,
    rotary_dim: int | None,
    base: float | None,
    partial: float | None,
    layer_type: str | None,
) -> RopeSettings:
    settings = rope.settings(self, head_size, layer_type)
    changes: dict[str, Any] = {}
    if base is not None:
        changes["rope_theta"] = base
    if rotary_dim is not None:
        changes["partial_rotary_factor"] = rotary_dim / settings.head_dim
    elif partial is not None:
        changes["partial_rotary_factor"] = partial
    return dataclasses.replace(settings, parameters={**settings.parameters, **changes})


def get_basic_causal_mask(
    self: DocumentedFields, max_length: int | None = None, dtype: DTypeLike = bool
) -> ModuleCaches | Literal[False]:
    """Return the causal mask [1, 1, l, l] on the mesh, nonzero where attention is allowed.

    Models do not use this array, whose size grows with the square of the length.

    Args:
        max_length: l; the default is `granted_mask_max_position_embedding`.
        dtype: Dtype of the mask.

    Returns:
        The mask, or False without a length if `precompute_masks` is off.
    """
    if max_length is None and not self.precompute_masks:
        return False
    length = max_length or granted_mask_max_position_embedding(self)
    return _on_mesh(jnp.asarray(masks.causal_mask(length), dtype), self.mesh)


def get_fcm_mask(
    self: DocumentedFields,
    batch_size: int | None = None,
    seq_length: int | None = None,
    deterministic: bool = False,
    *,
    key: jax.Array | None = None,
    shape: tuple[int, ...] | None = None,
    fcm_ratio: ArrayLike | None = None,
) -> jax.Array | None:
    """Return a forgetful causal mask, True where attention is kept, or None if it is disabled.

    There are two forms: `(batch_size, seq_length, deterministic, key=...)` returns [b, 1, s, s]
    with a random ratio between `fcm_min_ratio` and `fcm_max_ratio`; the other form is `(key=,
    shape=, fcm_ratio=)`. Without a key, each call draws another mask.

    Raises:
        ConfigError: The shape is missing.
    """
    if deterministic or (fcm_ratio is None and self.fcm_max_ratio == 0.0):
        return None
    if key is None:
        key = jax.random.key(secrets.randbits(31))
    if shape is None:
        if batch_size is None or seq_length is None:
            raise ConfigError("get_fcm_mask needs batch_size and seq_length, or shape")
        shape = (batch_size, 1, seq_length, seq_length)
    draw, drop = jax.random.split(key)
    low, high = self.fcm_min_ratio, self.fcm_max_ratio
    if fcm_ratio is None:
        fcm_ratio = jax.random.uniform(draw, (), minval=low, maxval=high)
    return masks.forgetful_mask(drop, shape, fcm_ratio)
