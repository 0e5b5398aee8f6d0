"""Depth: scanned equals unrolled, whatever the runs; a run compiles once for any depth."""

from __future__ import annotations

import depth_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.parameter_names import split_runs
from ed_layers import DenseCache, LayerCacheSpec
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st


def windowed(i):
    """Two windowed layers and a full one."""
    return {"window": None if i % 3 == 2 else 3}


def dense_first(i):
    return {"router": i > 0}


# Name: number of layers, depth of the scanned stack, what varies, and the expected runs.
CASES = {
    "equal": (4, {}, None, ["run_0_4_1"]),
    "period": (8, {"period": 3}, windowed, ["run_0_6_3", "run_6_1_1", "run_7_1_1"]),
    "remainder": (8, {"kinds": "WWFWWFWW"}, windowed, ["run_0_6_3", "run_6_2_1"]),
    "dense_first": (4, {"kinds": "DMMM"}, dense_first, ["run_0_1_1", "run_1_3_1"]),
    "singled_out": (
        5,
        {"kinds": [0, 0, 1, 0, 0]},
        lambda i: {"router": i == 2},
        ["run_0_2_1", "run_2_1_1", "run_3_2_1"],
    ),
}


def cases(*usual):
    """All cases; those that are not usual are for the nightly run."""
    return pytest.mark.parametrize(
        "name", [pytest.param(n, marks=() if n in usual else pytest.mark.nightly) for n in CASES]
    )


def pair(name):
    """The same layers, scanned and unrolled."""
    num_layers, depth, vary, _ = CASES[name]
    return (
        case.stack(num_layers, vary=vary, **depth),
        case.stack(num_layers, vary=vary, scan=False),
    )


def caller(stack, **options):
    """The stack as a compiled function of x, a cache, and its mask."""
    graphdef, state = nnx.split(stack)

    @jax.jit
    def call(x, cache=None, mask_info=None):
        ctx = case.context(mask_info, "train" if cache is None else "prefill")
        return nnx.merge(graphdef, state)(x, ctx, cache, **options)

    return call


@pytest.mark.nightly
@cases("remainder", "dense_first")
def test_scanned_stack_matches_unrolled_stack(name):
    scanned, unrolled = pair(name)
    assert [run.name for run in scanned.runs] == CASES[name][3]
    assert (scanned.layout, unrolled.layout) == ("stacked", "leaves")
    got, expected = (caller(stack, keep_hidden=True)(case.X) for stack in (scanned, unrolled))
    case.assert_near(got[0], expected[0])
    assert len(got[3]) == len(expected[3]) == CASES[name][0] + 1
    for a, b in zip(got[3], expected[3], strict=True):
        case.assert_near(a, b)
    metrics = (jax.tree.leaves(report.metrics) for report in (got[2], expected[2]))
    for a, b in zip(*metrics, strict=True):
        case.assert_near(a, b)
    case.assert_same(case.gradients(scanned), case.gradients(unrolled), 1e-5)


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_reports_are_summed_and_updates_keep_their_layer(scan):
    """A period in which the first slot alone has a router."""
    stack = case.stack(4, period=2, scan=scan, vary=lambda i: {"router": i % 2 == 0})
    _, _, report, hidden = caller(stack, keep_hidden=True)(case.X)
    size = report.metrics["size"]
    case.assert_near(size.sum, np.sum([np.max(x) for x in hidden[1:]]))
    assert float(size.weight) == 4
    loads = [np.mean(x, axis=(0, 2)) for x in hidden[1::2]]
    expected = {"run_0_4_2/0/load": loads} if scan else {"layer_0/load": loads[0]}
    expected |= {} if scan else {"layer_2/load": loads[1]}
    assert report.updates.keys() == expected.keys()
    for path, value in expected.items():
        case.assert_near(report.updates[path], value)


@cases("remainder", "dense_first")
def test_layout_conversion_round_trips_parameters(name):
    scanned, unrolled = pair(name)
    before = {k: np.asarray(v.get_value()) for k, v in nnx.to_flat_state(nnx.state(scanned))}
    scanned.to_layout("leaves")
    assert scanned.layout == "leaves"
    for (path, a), (other, b) in zip(
        nnx.to_flat_state(nnx.state(scanned)), nnx.to_flat_state(nnx.state(unrolled)), strict=True
    ):
        assert path == other
        np.testing.assert_array_equal(a.get_value(), b.get_value())
    scanned.to_layout("stacked")
    after = {k: np.asarray(v.get_value()) for k, v in nnx.to_flat_state(nnx.state(scanned))}
    assert before.keys() == after.keys()
    for key, value in before.items():
        np.testing.assert_array_equal(after[key], value)


@pytest.mark.nightly
@cases("dense_first")
def test_a_cache_goes_through_every_run(name):
    """Token by token equals the whole sequence, scanned and unrolled."""
    for stack in pair(name):
        call = caller(stack)
        want = call(case.X)[0]
        cache = DenseCache.create(
            [LayerCacheSpec(case.H, case.D // case.H)] * stack.num_layers,
            batch_size=case.B,
            capacity=case.S,
            layout=stack.layout,
        )
        got = []
        for part in np.split(case.X, [5, 10, 11], axis=1):
            ones = jnp.ones(part.shape[:2], jnp.int32)
            cache, mask_info, _ = cache.begin(ones)
            x, cache, _, _ = call(part, cache, mask_info)
            cache = cache.advance(part.shape[1])
            got.append(x)
        case.assert_near(np.concatenate(got, axis=1), want)


def test_windows_may_be_data_of_one_run():
    """Layers that differ in their window alone: a table, read by the traced index."""
    windows = (3, 0, 5)
    as_data = case.stack(3, vary=lambda i: {"windows": windows})
    assert [run.name for run in as_data.runs] == ["run_0_3_1"]
    static = case.stack(3, scan=False, vary=lambda i: {"window": windows[i] or None})
    case.assert_near(caller(as_data)(case.X)[0], caller(static)(case.X)[0])


@pytest.mark.nightly
def test_a_run_is_traced_and_compiled_once_for_any_depth():
    def size(num_layers, **depth):
        case.TRACED.clear()
        loss, state = case.objective(case.stack(num_layers, **depth))
        lowered = jax.jit(jax.grad(loss)).lower(state).as_text()
        return len(case.TRACED), lowered.count("dot_general")

    shallow, deep = size(2), size(24)
    assert shallow == deep
    assert size(8, period=2)[0] == 2 * deep[0]
    assert size(8, scan=False)[1] > 4 * deep[1]


def test_layers_that_differ_are_not_scanned_as_one():
    with pytest.raises(ConfigError, match="layers 0 and 3 are scanned as one run, but differ"):
        case.stack(4, vary=dense_first)
    with pytest.raises(ConfigError, match="layers 0 and 3"):
        case.stack(4, vary=lambda i: {"window": i + 1})
    with pytest.raises(ConfigError, match="Stack of 4 layers with 2 kinds"):
        case.stack(4, kinds="AB")
    with pytest.raises(ConfigError, match="no period beside them"):
        case.stack(4, kinds="ABAB", period=2)


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=14))
def test_runs_cover_the_depth_in_order(kinds):
    runs = split_runs(kinds)
    at = 0
    for run in runs:
        assert run.start == at
        for slot in range(run.period):
            assert len({kinds[i] for i in run.layers(slot)}) == 1
        assert run.period == 1 or run.repeats > 1
        at += run.length
    assert at == len(kinds)
    assert sum(run.period for run in runs) <= len(kinds)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("A" * 30, [(0, 30, 1)]),
        ("WWWWWF" * 8, [(0, 48, 6)]),
        ("WWWWWF" * 4 + "WW", [(0, 24, 6), (24, 2, 1)]),
        ("DDD" + "M" * 58, [(0, 3, 1), (3, 58, 1)]),
        ("LLLF" * 12, [(0, 48, 4)]),
        ("AAQA", [(0, 2, 1), (2, 1, 1), (3, 1, 1)]),
        ("", []),
    ],
)
def test_runs_of_finds_the_cheapest_partition(kinds, expected):
    assert [tuple(run) for run in split_runs(kinds)] == expected
