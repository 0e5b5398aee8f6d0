"""Attention kernels on a GPU against float64: `EASYDEL_TEST_PLATFORM=cuda pytest -m nightly`."""

from __future__ import annotations

import logging
from dataclasses import replace

import attention_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CELLS, SEGMENTS
from attention_reference import error
from ed_infra.logging import forget_said
from ed_layers.attention.kernels import gpu, packed_gpu

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
]

KERNELS = (*gpu.KERNELS, *packed_gpu.KERNELS)
# bfloat16 has 8 bits: half a step is 2e-3 of a value; of inputs that are rounded already.
FORWARD, GRADIENT = 1e-2, 2e-2
#: Rows that are one segment at the left, for which the kernels receive lengths.
LEFT = np.where(np.arange(SEGMENTS.shape[1]) < np.array([[61], [40]]), 1, 0)
ROWS = {"packed": SEGMENTS, "left": LEFT}
#: Cells that a kernel of this platform computes.
SUPPORTED = [
    name
    for name, cell in CELLS.items()
    if any(not cell.features & kernel.lacks for kernel in KERNELS)
]


def mechanisms(cell: str) -> list[str]:
    """Return the mechanisms with an installed GPU kernel for a cell."""
    fit = (k for k in KERNELS if k.available() and not CELLS[cell].features & k.lacks)
    return sorted({kernel.mechanism for kernel in fit})


@pytest.mark.parametrize("backward", ["triton", "xla"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("cell", SUPPORTED)
@pytest.mark.parametrize("width", [16, 64, 128])
def test_gpu_kernels_match_float64(cell, rows, backward, width, monkeypatch, caplog) -> None:
    names = mechanisms(cell)
    monkeypatch.setattr(cases, "HEAD_DIM", width)
    case = cases.case_of(CELLS[cell], segments=ROWS[rows])
    rounded = {n: np.asarray(jnp.asarray(getattr(case, n), "bfloat16"), "f") for n in "qkv"}
    case = replace(case, **rounded)
    d_out = cases.noise(case)
    expected = case.run(d_out)
    failures = {}
    for name in names:
        forget_said()
        cases.program.cache_clear()  # a program logs its kernel when it is traced
        caplog.clear()
        mechanism = cases.mechanism_of(
            name,
            CELLS[cell].features,
            attn_dtype="bfloat16",
            flash_attention_backward_pass_impl=backward,
        )
        with caplog.at_level(logging.INFO, logger="easydel"):
            found = cases.run(case, mechanism, d_out)
        said = " ".join(record.getMessage() for record in caplog.records)
        if "cuDNN" not in said and "Triton" not in said:
            failures[name] = said
        for tensor, wanted in expected.items():
            off = error(found[tensor], wanted)
            if not off <= (FORWARD if tensor == "out" else GRADIENT):
                failures[f"{name} {tensor}"] = off
    assert failures == {}
