"""Loading streams a 2 GB checkpoint: little host memory, and each device reads its own part."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tools.bench import loading

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


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
