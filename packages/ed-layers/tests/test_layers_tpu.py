"""TPU kernels compile for a v5e that is not here: ahead of time, where libtpu is installed."""

from __future__ import annotations

import math
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.masks import MaskInfo
from ed_layers.attention import Mechanism, attend
from ed_layers.cache.paged import PagedCache
from ed_layers.cache.ragged import RaggedBatch
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed"),
]
ONE, FOUR = (1, 1, 1, 1, 1), (1, 2, 1, 2, 1)
BF16, F32 = jnp.bfloat16, jnp.float32


@pytest.fixture(scope="module")
def devices() -> Any:
    """The four chips of a v5e:2x2, described, not attached.

    What is compiled for them cannot be read back from the cache of compiled programs.
    """
    from jax.experimental import topologies

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        described = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()
    yield described
    jax.config.update("jax_compilation_cache_dir", before)
    reset_cache()


def mechanism_on(devices: Any, dims: tuple[int, ...], **fields: Any) -> Mechanism:
    """A mechanism of a model whose mesh is of these devices."""
    config = EasyDeLBaseConfig(sharding_axis_dims=dims, **fields)
    used = np.array(devices[: math.prod(dims)]).reshape(dims)
    config.set_model_mesh(Mesh(used, config.sharding_axis_names))
    return Mechanism.resolve(config)


# Head dims of keys and values, dtype, mesh, and options of the layer.
TRAINING = [
    ("blocksparse", (128, 128), BF16, ONE, {}),
    ("blocksparse", (64, 64), BF16, FOUR, {"sinks": True}),
    ("blocksparse", (192, 128), BF16, ONE, {}),
    ("blocksparse", (96, 96), BF16, ONE, {"window": 100, "soft_cap": 30.0}),
    ("blocksparse", (128, 128), F32, ONE, {"chunk": 64}),
    ("flash_attn2", (128, 128), BF16, ONE, {}),
    ("flash_attn2", (64, 64), BF16, FOUR, {"chunk": 64}),
    ("flash_attn2", (128, 128), BF16, ONE, {"window": 64}),
    ("flash_attn2", (128, 128), BF16, ONE, {"blocksize_b": 2}),
    ("auto", (128, 128), BF16, FOUR, {"window": 64}),
]


@pytest.mark.parametrize(("name", "dims", "dtype", "mesh", "given"), TRAINING)
def test_training_kernels_compile_to_three_tpu_calls(
    name: str, dims: tuple, dtype: Any, mesh: tuple, given: dict, devices: Any
) -> None:
    given, b, s, h, g = dict(given), 4, 500, 8, 2
    rows = given.pop("blocksize_b", 1)
    mechanism = mechanism_on(devices, mesh, attn_mechanism=name, blocksize_b=rows)
    has_sinks = given.pop("sinks", False)

    def placed(shape: tuple, dtype: Any, *spec: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mechanism.config.mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def loss(q: Any, k: Any, v: Any, sinks: Any, segments: Any) -> Any:
        info = MaskInfo.from_segments(segments)
        sinks = sinks if has_sinks else None
        out = attend(q, k, v, info, sinks=sinks, mechanism=mechanism, **given)[0]
        return jnp.sum(out.astype(F32) ** 2)

    widths = [(h, dims[0]), (g, dims[0]), (g, dims[1])]
    qkv = [placed((b, s, *x), dtype, "fsdp", None, "tp") for x in widths]
    call = (*qkv, placed((h,), F32), placed((b, s), jnp.int32, "fsdp"))
    compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*call).compile()
    # The kernel forward, and one each for d_q and for d_k with d_v.
    assert compiled.as_text().count("tpu_custom_call") == 3


# Query and kv heads, dtype, mesh, and options of the layer.
PAGED = [
    (8, 2, BF16, ONE, {}),
    (8, 2, BF16, ONE, {"soft_cap": 20.0, "window": 100}),
    (8, 2, BF16, FOUR, {}),
    (16, 16, BF16, ONE, {}),
    (8, 1, BF16, ONE, {}),
    (32, 4, F32, ONE, {}),
]


@pytest.mark.parametrize(("heads", "groups", "dtype", "mesh", "given"), PAGED)
@pytest.mark.parametrize("stacked", [True, False])
def test_ragged_paged_attention_compiles_without_pool_copies(
    heads: int, groups: int, dtype: Any, mesh: tuple, given: dict, stacked: bool, devices: Any
) -> None:
    mechanism = mechanism_on(devices, mesh, attn_mechanism="ragged_page_attention_v3")
    whole = NamedSharding(mechanism.config.mesh, P())
    array = partial(jax.ShapeDtypeStruct, sharding=whole)
    ints = partial(array, dtype=jnp.int32)
    tokens, seqs, pages, width = 64, 8, 16, 128
    ragged = RaggedBatch(
        *(ints((seqs + 1,)), ints((seqs,)), ints((tokens,)), {"full": ints((tokens,))}),
        *({"full": ints((seqs, pages))}, ints((seqs,)), ints(())),
    )
    q, kv = (array((1, tokens, n, width), dtype) for n in (heads, groups))
    pool = array((*((2,) if stacked else ()), 128, 16, groups, 2, width), dtype)

    def step(q: Any, k: Any, v: Any, pool: Any, ragged: Any) -> Any:
        cache = PagedCache(pool if stacked else (pool,))
        call = {"cache": cache, "layer": jnp.asarray(1) if stacked else 0, "ragged": ragged}
        return attend(q, k, v, None, mechanism=mechanism, **call, **given)

    compiled = jax.jit(step, donate_argnums=3).lower(q, kv, kv, pool, ragged).compile()
    assert compiled.as_text().count("tpu_custom_call") == 1
    # No copy of the pool or of a layer: both are written and read in place.
    layer = 128 * 16 * 2 * groups * width * np.dtype(dtype).itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < layer / 2
