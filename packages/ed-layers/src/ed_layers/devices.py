"""The platform and the mesh of a model, and the split of attention over devices.

Legend: b batch, s query length, t key length, h heads, g kv heads, k head dim of queries and keys,
d head dim of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

if TYPE_CHECKING:
    from ed_infra.config import EasyDeLBaseConfig

#: The smallest block that Triton multiplies.
LEAST_TRITON_BLOCK = 16
#: One mesh axis, or several axes that split a dimension together.
AxisNames = str | tuple[str, ...]


def get_mesh(config: EasyDeLBaseConfig | None) -> Mesh | None:
    """Return the mesh of a model; None without a configuration, which means one device."""
    return None if config is None else config.mesh


def get_platform(config: EasyDeLBaseConfig | None) -> str:
    """Return the platform of a model's mesh ("cpu", "gpu" or "tpu"); for ahead-of-time compilation,
    this platform may be absent on this machine."""
    mesh = get_mesh(config)
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def get_compute_capability(config: EasyDeLBaseConfig | None) -> tuple[int, ...]:
    """Return the generation of a model's NVIDIA devices, (9, 0) for Hopper; () if unknown."""
    mesh = get_mesh(config)
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    text = str(getattr(device, "compute_capability", ""))
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def get_triton_block(count: int) -> int:
    """Return the size of the smallest block of a product that holds `count` rows or columns."""
    return max(LEAST_TRITON_BLOCK, 1 << (count - 1).bit_length())


def get_triton_precision(dtype: DTypeLike) -> jax.lax.DotAlgorithmPreset | None:
    """Return the precision of products of Triton kernels; None = TF32 for float32 numbers.

    Where jax computes float32 products in float32, three products of tensor cores replace one of
    the slow float32 units; the result is as exact.
    """
    matmul_precision = jax.config.values["jax_default_matmul_precision"]
    exact = matmul_precision in ("highest", "float32")
    if exact and jnp.dtype(dtype) == jnp.float32:
        return jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return None


def get_mesh_axes(
    config: EasyDeLBaseConfig,
    names: tuple[str | None, ...],
    shape: tuple[int, ...] | None = None,
    mode: str = "train",
) -> tuple[AxisNames | None, ...]:
    """Return the mesh axes that split each dimension, by the partition rules of a model."""
    if config.mesh.size == 1:
        return (None,) * len(names)
    spec = config.partition_manager.resolve(names, mode, shape, config.mesh)
    return (*spec, *(None,) * len(names))[: len(names)]


def sequence_axes(config: EasyDeLBaseConfig | None) -> AxisNames | None:
    """Return the mesh axes that split the sequence of a model's activations; None if it is not
    split."""
    return None if config is None else get_mesh_axes(config, ("batch", "sequence"))[1]


def ways(mesh: Mesh | AbstractMesh, axes: AxisNames | None) -> int:
    """Return the number of parts into which the axes split a dimension."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(mesh.shape[name] for name in names)


def repeated_for(
    parts: int, k: Float[Array, "b t g k"], v: Float[Array, "b t g d"]
) -> tuple[jax.Array, jax.Array]:
    """Repeat key heads that `parts` devices do not divide, so that each device has the key heads of
    its queries."""
    repeat = math.lcm(k.shape[2], parts) // k.shape[2]
    return (k, v) if repeat == 1 else (jnp.repeat(k, repeat, axis=2), jnp.repeat(v, repeat, axis=2))


def over_devices(
    kernel: Callable[..., jax.Array],
    config: EasyDeLBaseConfig | None,
    q: Float[Array, "b s h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g d"],
    rows: object,
    heads: object = None,
) -> Float[Array, "b s h d"]:
    """Run a kernel on the rows and heads of each device, with whole sequences: XLA cannot split a
    kernel.

    Args:
        kernel: `(q, k, v, rows, heads) -> out [b, s, h, d]` on one device.
        config: configuration of the model; its partition rules determine the split of batch and
            heads.
        rows: pytree of arrays whose first axis is the batch.
        heads: pytree of arrays whose first axis is the heads.
    """
    if config is None or config.mesh.size == 1:
        return kernel(q, k, v, rows, heads)
    batch, _, head = get_mesh_axes(config, ("batch", None, "heads"), q.shape)
    k, v = repeated_for(ways(config.mesh, head), k, v)
    spec = P(batch, None, head)
    run = jax.shard_map(
        kernel,
        mesh=config.mesh,
        in_specs=(spec, spec, spec, P(batch), P(head)),
        out_specs=spec,
        check_vma=False,
    )
    return run(q, k, v, rows, heads)
