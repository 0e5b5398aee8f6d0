"""An engine over the devices of two processes gives what one of a single process gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ed_infra.errors import ConfigError
from ed_infra.testing import run_processes

from tests.multidevice.serving_processes import engine, served

pytestmark = pytest.mark.xdist_group("several_processes")


@pytest.mark.nightly
def test_two_processes_take_the_same_steps(tmp_path: Path) -> None:
    command = ["-m", "tests.multidevice.serving_processes", str(tmp_path)]
    run_processes(command, tmp_path, processes=2, devices=2)
    alone = engine((1, 1, 1, 1, 1))
    assert json.loads((tmp_path / "tokens.json").read_text()) == served(alone)
    assert alone.stats()["num_preemptions"] > 0
    with pytest.raises(ConfigError, match="nobody to follow"):
        alone.follow()
