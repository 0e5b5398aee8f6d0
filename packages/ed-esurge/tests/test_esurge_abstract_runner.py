"""A runner without arrays has the programs of a runner with arrays."""

from __future__ import annotations

from typing import Any

import pytest
from ed_esurge.config import EngineConfig
from ed_esurge.engine.abstract_runner import (
    create_abstract_runner,
    get_xla_dtype,
    list_page_arrays,
    list_steps,
)
from ed_esurge.engine.setup import Setup
from ed_infra.compilation.hlo import parse_hlo
from ed_infra.compilation.launches import LaunchList

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4,
    "page_size": 8,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "num_pages": 32,
    "use_aot_forward": False,
}


def describe(tree: object) -> list[tuple[Any, ...]]:
    """Return shape, dtype and sharding on each device of every array."""
    import jax

    return [
        (x.shape, x.dtype.name, x.sharding.shard_shape(x.shape), len(x.sharding.device_set))
        for x in jax.tree.leaves(tree)
    ]


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_runner_without_arrays_has_the_shapes_of_a_runner(llama, make_llama, devices: int):
    model = llama if devices == 1 else make_llama(mesh=(1, 1, 1, devices, 1))
    setup = Setup.resolve(model, EngineConfig(**OPTIONS))
    sizes = setup.pool_sizes()
    real, described = setup.runner(sizes=sizes), create_abstract_runner(setup, sizes)
    for name in ("cache", "state", "sums"):
        arrays, shapes = (getattr(one.memory, name) for one in (real, described))
        assert describe(arrays) == describe(shapes)
    (pool,) = list_page_arrays(described, setup, seqs=4, context=16)
    # A part of the four heads on each device; keys and values of four sequences of 16 tokens.
    heads, width = 4 // devices, 8
    assert pool.shape.dims == (32, 8, heads, 2, width)
    assert pool.step_bytes == 4 * 16 * heads * 2 * width * 4
    assert pool.shape.dtype == "f32"


@pytest.mark.nightly
def test_programs_of_a_runner_without_arrays_are_those_of_a_runner(llama):
    setup = Setup.resolve(llama, EngineConfig(**OPTIONS))
    sizes = setup.pool_sizes()
    real, described = setup.runner(sizes=sizes), create_abstract_runner(setup, sizes)
    steps = list_steps(setup)
    assert [(name, one.tokens) for name, one in steps.items()] == [
        ("decode step", 4),
        ("mixed step", 16),
    ]
    for step in steps.values():
        for key in step.keys:
            ours, theirs = (one.functions.lower(key).as_text() for one in (described, real))
            assert ours == theirs


def test_decode_step_with_a_minimum_of_rows_is_the_smallest_that_fits(llama):
    setup = Setup.resolve(llama, EngineConfig(**OPTIONS | {"max_num_seqs": 16}))
    assert list_steps(setup, rows=3)["decode step"].seqs == 4
    assert list_steps(setup)["decode step"].seqs == 16


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *(("bfloat16", "bf16"), ("float32", "f32"), ("int8", "s8"), ("uint8", "u8")),
        *(("float8_e4m3fn", "f8e4m3fn"), ("bool", "pred")),
    ],
)
def test_types_have_the_names_of_xla(dtype: str, name: str):
    assert get_xla_dtype(dtype) == name


@pytest.mark.nightly
def test_decode_step_of_a_cpu_writes_its_pages_in_place(llama):
    setup = Setup.resolve(llama, EngineConfig(**OPTIONS))
    runner = create_abstract_runner(setup, setup.pool_sizes())
    key = list_steps(setup)["decode step"].keys[0]
    text = runner.functions.lower(key).compile().as_text()
    pools = list_page_arrays(runner, setup, seqs=4, context=16)
    assert not any(one.pool_copied for one in LaunchList(parse_hlo(text), pools).launches)
