"""`batch_invariant`: engine, trainer and generate compute the same bits, on every mesh."""

from __future__ import annotations

import numpy as np
import pytest
from ed_layers.native import library

from tools.bench.bits import DTYPES, EQUAL, cells_of, create, of_engine, of_forward, prompts

pytestmark = pytest.mark.skipif(
    library.level() is None, reason="not built: python -m ed_layers.native build"
)


def test_engine_and_forward_pass_on_a_mesh_have_equal_bits() -> None:
    model, asked = create("llama", "float32", num_hidden_layers=1), prompts()[:2]
    rows, bits = of_engine(model, asked, new=3)
    mesh = create("llama", "float32", (2, 1, 1, 2, 1), num_hidden_layers=1)
    for found, expected in zip(of_forward(mesh, rows, 2), bits, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", EQUAL)
def test_bits_of_a_family_are_equal_under_every_condition(model_type: str, dtype: str) -> None:
    cells = cells_of(model_type, dtype)
    assert {name: cell for name, cell in cells.items() if cell != "equal"} == {}
