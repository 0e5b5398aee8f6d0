"""Memory limits of training options, and of loading, which streams a checkpoint to its devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tools.bench import loading, memory

pytestmark = pytest.mark.nightly


def test_every_remat_policy_has_equal_gradients_and_bounded_cost(
    record_property: Callable[[str, object], None],
) -> None:
    rows = memory.measure_policies(layers=8, width=64, batch=2, length=512)
    record_property("summary", "policies\n" + memory.show_policies(rows))
    assert all(row.error <= 1e-6 for row in rows)
    temp = {row.policy: row.temp for row in rows}
    flops = {row.policy: row.flops for row in rows}
    least = "nothing_saveable"
    assert temp[least] == min(temp.values())
    assert temp[least] < 0.25 * temp[""]
    # At most the forward pass is recomputed, and saving memory costs flops.
    assert 1.2 * flops[""] < flops[least] == max(flops.values()) < 4 / 3 * flops[""]
    assert temp[least] < temp["save_only_these_names"] < temp["checkpoint_dots"] < temp[""]
    assert flops["checkpoint_dots"] < flops["save_from_both_policies"]
    assert flops["save_from_both_policies"] < flops["save_only_these_names"] < flops[least]


def test_blockwise_memory_is_linear_in_sequence_length(
    record_property: Callable[[str, object], None],
) -> None:
    points = memory.measure_lengths()
    record_property("summary", "memory of training by length\n" + memory.show_lengths(points))
    by_length = {point.length: point for point in points}
    short, long = by_length[4096], by_length[32768]
    assert long.blockwise / long.length < 1.3 * short.blockwise / short.length
    # Full scores are quadratic, so the linear growth is not an artifact of the measurement.
    assert long.vanilla / long.length > 6 * short.vanilla / short.length
    assert long.blockwise < long.vanilla / 100


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("processes_with_torch")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_gigabyte_load_stays_within_memory_limit(
    dtype: str, record_property: Callable[[str, object], None]
) -> None:
    result = loading.measure(2.0, dtype, rounds=1)
    record_property("summary", "loading\n" + loading.show([result]))
    assert result.size > 1.8e9
    assert max(result.host) < 0.20
    assert len(result.shares) == 4
    assert all(abs(share - 0.25) < 0.01 for share in result.shares)
