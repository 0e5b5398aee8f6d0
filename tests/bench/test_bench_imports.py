"""Memory limits of imports. Durations are not tested, because other load affects them."""

from __future__ import annotations

from tools.bench import imports


def test_importing_ed_data_stays_within_memory_limits() -> None:
    assert imports.cost("import ed_data")[2] < 8 * 2**20
    options = "from ed_data import Mixture; Mixture"
    assert imports.cost(options)[2] < 48 * 2**20
    assert imports.cost("import ed_data.tokens.worker")[2] < 16 * 2**20
