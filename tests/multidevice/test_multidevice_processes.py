"""Two processes of four devices compute the same values as one process of eight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ed_infra.testing import run_processes

from tests.multidevice.several_processes import on_mesh

pytestmark = pytest.mark.xdist_group("several_processes")

# Bitwise equal: weights always, the forward pass if no sum crosses devices, and everything if the
# sums over devices have the same order.
EVERYTHING = ("created", "sharded", "logits", "loss", "gradient")
MESHES = [
    pytest.param((1, 2, 1, 2, 2), EVERYTHING, id="model_and_rows_over_processes"),
    pytest.param((1, 8, 1, 1, 1), EVERYTHING[:3], id="fsdp"),
    pytest.param((2, 1, 1, 4, 1), EVERYTHING[:2], id="replicas"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("dims", "exact"), MESHES)
def test_two_processes_compute_same_values_as_one(
    tmp_path: Path, dims: tuple[int, int, int, int, int], exact: tuple[str, ...]
) -> None:
    command = ["-m", "tests.multidevice.several_processes", str(tmp_path), *map(str, dims)]
    run_processes(command, tmp_path, processes=2, devices=4)
    messages = [(tmp_path / f"messages_{i}.txt").read_text().splitlines() for i in range(2)]
    assert messages[0][:3] == [
        "2 processes, 8 devices (4 here)",
        "an event of the whole run",
        "an error of process 0",
    ]
    assert messages[1] == ["an error of process 1"]  # one line per event, not one per process

    one = on_mesh(dims)
    with np.load(tmp_path / "values.npz") as two:
        assert set(two.files) == set(one) and len(one) > 30
        for name, value in one.items():
            if name.split()[0] in exact:
                np.testing.assert_array_equal(two[name], value, err_msg=name)
            worst = np.abs(two[name] - value).max() / np.abs(value).max()
            assert worst <= 1e-6, (name, worst)
