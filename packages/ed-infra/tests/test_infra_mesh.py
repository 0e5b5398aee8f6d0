"""Meshes: -1, too few and too many devices, slices; specs that fit meshes and shapes."""

from __future__ import annotations

import math
import os
import signal
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError, MeshError
from ed_infra.sharding.axes import PARAM_AXES, PartitionAxis
from ed_infra.sharding.mesh import create_mesh, resolve_axis_dims
from ed_infra.sharding.partition import PartitionManager, fit_spec
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


@given(st.lists(st.sampled_from([1, 2, 4]), min_size=5, max_size=5), st.integers(0, 4))
def test_minus_one_axis_takes_remaining_devices(dims: list[int], free: int):
    count = math.prod(dims)
    given_dims = [*dims[:free], -1, *dims[free + 1 :]]
    assert resolve_axis_dims(given_dims, count) == tuple(dims)


@pytest.mark.parametrize(
    ("dims", "says"),
    [
        ((1, -1, 1, 1, -1), "only one axis can be -1, 2 are"),
        ((1, 3, 1, 1, -1), r"8 devices / \(1 × 3 × 1 × 1\) = 2.66667"),
        ((1, 4, 1, 4, 1), r"1 × 4 × 1 × 4 × 1 = 16 devices, but there are 8"),
        ((1, 0, 1, 1, 1), "at least 1"),
        ((1, -2, 1, 1, 1), "at least 1"),
        ((2, 4), "2 axis dims"),
    ],
)
def test_mesh_size_error_states_device_counts(dims: tuple[int, ...], says: str):
    with pytest.raises(MeshError, match=says):
        create_mesh(dims)


def test_a_smaller_mesh_takes_the_first_devices():
    mesh = create_mesh((1, 2, 1, 2, 1))
    assert [d.id for d in mesh.devices.flat] == [0, 1, 2, 3]
    assert mesh.axis_types == (AxisType.Auto,) * 5
    assert create_mesh().shape["fsdp"] == jax.device_count() == 8
    assert create_mesh((1, -1, 1, 1, 1), devices=jax.devices()[:4]).size == 4


def test_slices_are_the_outer_part_of_an_axis():
    mesh = create_mesh((1, 2, 1, 2, 1), dcn_dims=(1, 2, 1, 1, 1))
    assert mesh.shape["fsdp"] == 4
    ids = [[d.id for d in row] for row in mesh.devices[0, :, 0, :, 0]]
    assert ids == [[0, 1], [2, 3], [4, 5], [6, 7]]  # two slices of four devices, one after another
    assert create_mesh((1, -1, 1, 1, 1), dcn_dims=(2, 1, 1, 1, 1)).shape["fsdp"] == 4
    with pytest.raises(MeshError, match="3 equal parts"):
        create_mesh((1, -1, 1, 1, 1), dcn_dims=(3, 1, 1, 1, 1))
    with pytest.raises(MeshError, match="every device must be used"):
        create_mesh((1, 2, 1, 1, 1), dcn_dims=(2, 1, 1, 1, 1))


def test_a_backend_that_is_not_there():
    with pytest.raises(MeshError, match="'tpu' is not available here"):
        create_mesh(backend="tpu")
    with pytest.raises(MeshError, match="occurs twice"):
        create_mesh((1, 1), names=("a", "a"))


def test_parameters_resolve_by_the_meaning_of_their_axes():
    manager = PartitionManager()
    assert manager.param(("embed", "heads")) == P("fsdp", "tp")
    assert manager.param(("vocab", "embed")) == P("tp", "fsdp")
    assert manager.param(("expert", "embed", "mlp")) == P("ep", "fsdp", "tp")
    assert manager.param(("norm",)) == P(None)
    assert manager.param(("heads", "mlp")) == P("tp", None)  # a mesh axis serves once
    for axis in PARAM_AXES:
        manager.param((axis,))
    with pytest.raises(ConfigError, match="'embd'; did you mean 'embed'"):
        manager.param(("embd",))
    own = PartitionManager(PartitionAxis(head_axis=("tp", "sp")))
    assert own.param(("embed", "heads")) == P("fsdp", ("tp", "sp"))


def test_activations_resolve_by_mode_mesh_and_shape():
    manager = PartitionManager()
    assert manager.resolve(("batch", "sequence", "hidden")) == P(("fsdp", "dp"), "sp", None)
    assert manager.resolve(("batch", "sequence"), mode="decode") == P(("fsdp", "dp"), None)
    assert manager.resolve(["dp", "tp"], mode="train", shape=(8, 1024)) == P("dp", "tp")
    mesh = create_mesh((2, 2, 1, 2, 1))
    assert manager.resolve(("batch", None), shape=(8, 3), mesh=mesh) == P(("fsdp", "dp"))
    assert manager.resolve(("batch", "heads"), shape=(6, 4), mesh=mesh) == P(None, "tp")
    with pytest.raises(ConfigError, match="unknown mode"):
        manager.resolve(("batch",), mode="serve")


def test_a_spec_is_fitted_to_mesh_and_shape():
    mesh = create_mesh((1, 4, 1, 2, 1))
    assert fit_spec(P("fsdp", "tp"), (8, 8), mesh) == (P("fsdp", "tp"), [])
    spec, notes = fit_spec(P("fsdp", "tp"), (6, 8), mesh)
    assert spec == P(None, "tp")
    assert notes == ["dimension 0 of (6, 8) does not divide by fsdp = 4"]
    assert fit_spec(P("dp", None), (8, 8), mesh)[0] == P()
    with pytest.raises(MeshError, match="3 entries for an array of 2"):
        fit_spec(P(None, None, "tp"), (8, 8), mesh)


def run_in_fork(work) -> str:
    """Return the text, or the error, of a function in a forked child; "" = the child hangs."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # jax warns of its threads
        child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)  # ends a child that hangs
        try:
            text = str(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode()[:4096])
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        text = file.read().decode()
    os.waitpid(child, 0)
    return text


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_compiled_functions_in_a_forked_child_raise_at_once():
    mesh = create_mesh()
    x = jnp.ones((256, 256))
    compute = jax.jit(lambda x: (x @ x).sum())
    compiled = compute.lower(x).compile()
    expected = float(compute(x)), float(compiled(x))
    sharded = jax.device_put(np.ones((8, 8)), NamedSharding(mesh, P("fsdp")))
    for work in (
        lambda: compute(x),
        lambda: compiled(x),
        lambda: x + 1,
        lambda: jnp.asarray(np.ones((2000, 2000))),
        lambda: sharded.sum(),
    ):
        text = run_in_fork(work)
        assert text.startswith("ForkedProcessError: process "), text
        assert "spawn" in text
    assert run_in_fork(lambda: np.asarray(x).sum()) == str(np.ones((256, 256)).sum())
    assert (float(compute(x)), float(compiled(x))) == expected
