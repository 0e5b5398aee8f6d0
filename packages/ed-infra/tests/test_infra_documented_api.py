"""What EasyDeL's page of the base configuration documents about meshes and positions acts.

`proves` names what a test shows; docs/config_reference.md is made from it. Execution fields whose
effect needs a model are shown by packages/ed-models/tests/test_models_knobs.py; values and files by
test_infra_documented_values.py.
"""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.config.documented import ModuleCaches
from ed_infra.errors import ConfigError, MeshError
from ed_infra.sharding.axes import PartitionAxis
from ed_infra.sharding.mesh import create_mesh
from ed_infra.specs import AttnMaskDetail
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

proves = pytest.mark.proves
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 32}


# --- meshes ---------------------------------------------------------------------------------------


@proves("create_mesh", "create_mesh(sharding_axis_dims)", "create_mesh(sharding_axis_names)")
@proves("create_mesh(axis_dims)", "create_mesh(axis_names)")
@proves("create_mesh(backend)")
def test_both_call_forms_of_create_mesh():
    names = ("a", "b")
    new = EasyDeLBaseConfig.create_mesh(sharding_axis_dims=(2, -1), sharding_axis_names=names)
    old = EasyDeLBaseConfig(**SIZES).create_mesh(axis_dims=(2, -1), axis_names=names, backend="cpu")
    assert new == old
    assert dict(new.shape) == {"a": 2, "b": 4}
    assert dict(EasyDeLBaseConfig.create_mesh().shape)["fsdp"] == 8
    with pytest.raises(ConfigError, match="keep one"):
        EasyDeLBaseConfig.create_mesh(sharding_axis_dims=(8, 1), axis_dims=(8, 1))
    with pytest.raises(MeshError, match="backend 'tpu' is not available here"):
        EasyDeLBaseConfig.create_mesh(backend="tpu")


def device(number: int, process: int, slice_index: int | None, x: int = 0) -> Any:
    """The attributes of a device that a mesh reads."""
    return types.SimpleNamespace(
        id=number,
        process_index=process,
        slice_index=slice_index,
        platform="cpu" if slice_index is None else "gpu",
        device_kind="fake",
        coords=(x, 0, 0),
        core_on_chip=0,
        client=None,
    )


@proves("create_mesh(sharding_dcn_axis_dims)", "sharding_dcn_axis_dims")
@proves("create_mesh(process_is_granule)", "create_mesh(should_sort_granules_by_key)")
def test_create_mesh_groups_devices_by_slice_or_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ed_infra.sharding.mesh.Mesh", lambda array, names, axis_types: array)
    # Two slices of two processes each, two devices a process; the second slice comes first.
    devices = [device(i, i // 2, 1 - i // 4) for i in range(8)]

    def ids(dims: tuple[int, int], dcn: tuple[int, int], **how: bool) -> list[list[int]]:
        array = create_mesh(dims, ("a", "b"), dcn, devices, **how)
        return [[d.id for d in row] for row in np.asarray(array)]

    assert ids((1, 4), (2, 1)) == [[4, 5, 6, 7], [0, 1, 2, 3]]
    unsorted = ids((1, 4), (2, 1), should_sort_granules_by_key=False)
    assert unsorted == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(MeshError, match="need 4 slices, but there are 2"):
        ids((1, 2), (4, 1))
    assert ids((1, 2), (4, 1), process_is_granule=True) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    config = EasyDeLBaseConfig(
        **SIZES, sharding_axis_dims=(1, -1, 1, 1, 1), sharding_dcn_axis_dims=(2, 1, 1, 1, 1)
    )
    monkeypatch.undo()
    assert dict(config.mesh.shape) == {"dp": 2, "fsdp": 4, "ep": 1, "tp": 1, "sp": 1}


@proves("create_mesh(allow_split_physical_axes)")
def test_create_mesh_rejects_split_torus_when_disallowed(monkeypatch: pytest.MonkeyPatch):
    def torus(shape: Any, devices: Any, *, allow_split_physical_axes: bool) -> Any:
        if not allow_split_physical_axes:
            raise NotImplementedError("would split")
        return np.asarray(devices, dtype=object).reshape(shape)

    monkeypatch.setattr("ed_infra.sharding.mesh.mesh_utils.create_device_mesh", torus)
    monkeypatch.setattr("ed_infra.sharding.mesh.Mesh", lambda array, names, axis_types: array)
    devices = [device(i, 0, 0, i) for i in range(4)]
    for one in devices:
        one.platform = "tpu"
    assert create_mesh((2, 2), ("a", "b"), devices=devices).shape == (2, 2)
    with pytest.raises(MeshError, match="allow_split_physical_axes=True"):
        create_mesh((2, 2), ("a", "b"), devices=devices, allow_split_physical_axes=False)


@proves("mesh", "set_model_mesh", "jax_mesh", "get_axis_dims", "get_axis_names")
def test_the_mesh_of_a_configuration():
    config = EasyDeLBaseConfig(**SIZES, sharding_axis_dims=(2, 2, 1, 2, 1))
    assert dict(config.mesh.shape) == {"dp": 2, "fsdp": 2, "ep": 1, "tp": 2, "sp": 1}
    assert config.mesh is config.mesh is config.jax_mesh()
    made = EasyDeLBaseConfig.create_mesh(config.get_axis_dims(), config.get_axis_names())
    assert made == config.mesh
    other = EasyDeLBaseConfig.create_mesh((1, 1, 1, 8, 1))
    config.set_model_mesh(other)
    assert config.mesh is config.jax_mesh() is other
    config.seal()
    with pytest.raises(ConfigError, match=r"config\.replace\(\)"):
        config.set_model_mesh(made)


@proves("expert_mesh", "auto_expert_mesh", "expert_abstract_mesh")
@proves("fsdp_is_ep_bound", "sp_is_ep_bound")
@pytest.mark.parametrize(
    ("fsdp", "sp", "shape"),
    [
        (True, True, (1, 8, 1)),
        (False, True, (2, 4, 1)),
        (True, False, (2, 4, 1)),
        (False, False, (4, 2, 1)),
    ],
)
def test_expert_mesh_shape_follows_ep_bound_options(fsdp: bool, sp: bool, shape: tuple[int, ...]):
    config = EasyDeLBaseConfig(
        **SIZES,
        sharding_axis_dims=(1, 2, 2, 1, 2),
        fsdp_is_ep_bound=fsdp,
        sp_is_ep_bound=sp,
    )
    mesh = config.expert_mesh
    assert tuple(mesh.shape.items()) == tuple(zip(("dp", "ep", "tp"), shape, strict=True))
    assert mesh.axis_types == (AxisType.Explicit,) * 3
    assert config.auto_expert_mesh.axis_types == (AxisType.Auto,) * 3
    assert (config.auto_expert_mesh.devices == mesh.devices).all()
    assert config.expert_abstract_mesh.shape == mesh.shape
    assert not hasattr(config.expert_abstract_mesh, "devices_indices_map")


@proves("partition_manager", "PartitionManager.resolve", "PartitionAxis")
def test_the_call_of_the_page():
    config = EasyDeLBaseConfig(**SIZES)
    resolve = config.partition_manager.resolve
    assert resolve(axes=["dp", "tp"], mode="train", shape=(8, 1024)) == PartitionSpec("dp", "tp")
    moved = config.replace(partition_axis=PartitionAxis(head_axis="ep"))
    batch = ("fsdp", "dp")
    assert moved.partition_manager.resolve(["batch", "heads"]) == PartitionSpec(batch, "ep")
    assert resolve(["batch", "sequence"], mode="decode") == PartitionSpec(batch, None)


# --- positions ------------------------------------------------------------------------------------


@proves("get_basic_frequencies", "get_basic_frequencies(base)", "ModuleCaches")
@proves("get_basic_frequencies(head_size)", "get_basic_frequencies(rotary_dim)")
@proves("get_basic_frequencies(max_position_embeddings)")
@proves("get_basic_inv_frequencies", "get_basic_inv_frequencies(head_size)")
@proves("get_basic_inv_frequencies(rotary_dim)", "get_basic_inv_frequencies(base)")
@proves("get_basic_inv_frequencies(partial_rotary_factor)", "granted_freq_max_position_embedding")
@proves("hidden_size", "num_attention_heads")
def test_basic_frequencies_have_expected_shapes_and_values():
    config = EasyDeLBaseConfig(**SIZES, rope_theta=100.0)
    table = config.get_basic_frequencies()
    assert isinstance(table, ModuleCaches) and table.shape == (32, 16)
    assert len(table.sharding.device_set) == config.mesh.size == 8
    assert config.get_basic_frequencies(8).shape == (32, 8)
    assert config.replace(hidden_size=128).get_basic_frequencies().shape == (32, 32)
    assert config.replace(num_attention_heads=8).get_basic_frequencies().shape == (32, 8)
    assert config.get_basic_frequencies(8, rotary_dim=4).shape == (32, 4)
    assert config.get_basic_frequencies(max_position_embeddings=5).shape == (5, 16)
    assert not np.allclose(config.get_basic_frequencies(base=7.0), table)
    inverse = config.get_basic_inv_frequencies()
    np.testing.assert_allclose(np.cos(np.asarray(inverse) * 3), table[3, :8], rtol=1e-6)
    assert config.get_basic_inv_frequencies(head_size=8).shape == (4,)
    assert config.get_basic_inv_frequencies(rotary_dim=4).shape == (2,)
    assert config.get_basic_inv_frequencies(partial_rotary_factor=0.5).shape == (4,)
    assert config.get_basic_inv_frequencies(base=9.0)[1] != inverse[1]
    longer = config.replace(freq_max_position_embeddings=64)
    assert longer.get_basic_frequencies().shape == (longer.granted_freq_max_position_embedding, 16)

    class Module(nnx.Module):
        def __init__(self) -> None:
            self.frequencies = nnx.data(table)

    assert not jax.tree.leaves(nnx.state(Module(), nnx.Param)), "no parameter"
    assert len(jax.tree.leaves(nnx.state(Module()))) == 1


@proves("get_basic_rope", "get_basic_rope(dtype)", "get_basic_rope(head_size)")
@proves("get_basic_rope(rotary_dim)", "get_basic_rope(is_neox_style)", "get_basic_rope(base)")
@proves("get_basic_rope(max_position_embeddings)", "rope_theta", "rope_scaling")
@proves("max_position_embeddings")
def test_both_forms_of_a_rotary_embedding():
    config = EasyDeLBaseConfig(**SIZES)
    sin, cos = config.get_basic_rope(
        dtype=jnp.bfloat16, head_size=16, rotary_dim=8, max_position_embeddings=7
    )
    assert sin.shape == cos.shape == (7, 4)
    assert sin.dtype == jnp.bfloat16
    assert next(iter(config.get_basic_rope())).shape[0] == config.max_position_embeddings
    q = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 4, 16)), jnp.float32)
    positions = jnp.arange(5)[None]

    def turned(config: EasyDeLBaseConfig = config, **how: Any) -> np.ndarray:
        rope = config.get_basic_rope(jnp.float32, 16, **how)
        return np.asarray(rope(q, q[:, :, :2], positions)[0])

    plain = turned()
    half = turned(rotary_dim=8)
    np.testing.assert_array_equal(half[..., 8:], q[..., 8:])
    for other in (
        half,
        turned(is_neox_style=False),
        turned(base=5.0),
        turned(config.replace(rope_theta=5.0)),
        turned(config.replace(rope_scaling={"type": "linear", "factor": 2.0})),
    ):
        assert not np.allclose(other, plain)
    np.testing.assert_array_equal(turned(base=5.0), turned(config.replace(rope_theta=5.0)))


@proves("get_basic_causal_mask", "get_basic_causal_mask(max_length)")
@proves("get_basic_causal_mask(dtype)", "precompute_masks", "granted_mask_max_position_embedding")
def test_basic_causal_mask_follows_config_lengths():
    config = EasyDeLBaseConfig(**SIZES)
    mask = config.get_basic_causal_mask(max_length=6, dtype=jnp.float32)
    assert isinstance(mask, ModuleCaches) and mask.dtype == jnp.float32
    np.testing.assert_array_equal(mask[0, 0], np.tril(np.ones((6, 6))))
    assert config.get_basic_causal_mask().shape == (1, 1, 32, 32)
    short = config.replace(mask_max_position_embeddings=8)
    assert short.granted_mask_max_position_embedding == 8
    assert short.get_basic_causal_mask().shape == (1, 1, 8, 8)
    assert config.replace(precompute_masks=False).get_basic_causal_mask() is False


@proves("get_fcm_mask", "get_fcm_mask(batch_size)", "get_fcm_mask(seq_length)")
@proves("get_fcm_mask(deterministic)", "get_fcm_mask(key)", "get_fcm_mask(shape)")
@proves("get_fcm_mask(fcm_ratio)")
def test_both_forms_of_a_forgetful_mask():
    config = EasyDeLBaseConfig(**SIZES, fcm_max_ratio=0.5)
    key = jax.random.key(0)
    assert config.get_fcm_mask(2, 9, deterministic=True) is None
    mask = config.get_fcm_mask(2, 9, deterministic=False, key=key)
    assert mask is not None and mask.shape == (2, 1, 9, 9) and not bool(mask.all())
    given = config.get_fcm_mask(key=key, shape=(64, 1, 4, 64), fcm_ratio=0.25)
    assert given is not None and 0.2 < 1 - float(given.mean()) < 0.3
    other = config.get_fcm_mask(key=jax.random.key(1), shape=(64, 1, 4, 64), fcm_ratio=0.25)
    assert bool((other != given).any())


@proves("get_mask_details", "AttnMaskDetail")
def test_mask_details_follow_layer_types():
    assert EasyDeLBaseConfig(**SIZES).get_mask_details() is None
    config = EasyDeLBaseConfig(**SIZES)
    config.attach_custom_arguments(
        layer_types=["sliding_attention", "full_attention"], sliding_window=4
    )
    details = config.get_mask_details()
    assert details == {0: AttnMaskDetail("sliding", 4), 1: AttnMaskDetail()}
    with pytest.raises(ConfigError, match="did you mean 'sliding'"):
        AttnMaskDetail("slidding", 4)
