"""`batch_invariant`: engine, trainer and generate compute the same bits, on every mesh."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_layers.native import library
from flax import nnx

from tests.conformance.bits import cells_of, create, of_engine, of_forward, prompts
from tools.bits_table import equal_rows, read

pytestmark = pytest.mark.skipif(
    library.level() is None, reason="not built: python -m ed_layers.native build"
)


@pytest.mark.daily("deepseek_v3")
@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_engine_and_forward_pass_on_a_mesh_have_equal_bits(model_type: str) -> None:
    model, asked = create(model_type, "float32", num_hidden_layers=1), prompts()[:2]
    rows, bits = of_engine(model, asked, new=3)
    mesh = create(model_type, "float32", (2, 1, 1, 2, 1), num_hidden_layers=1)
    for found, expected in zip(of_forward(mesh, rows, 2), bits, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_model_with_sums_of_xla_is_refused_with_their_place() -> None:
    model = create("llama", "float32", num_hidden_layers=1, attn_softmax_dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"batch_invariant=True.* in vanilla\.py"):
        jax.eval_shape(lambda: model(np.ones((1, 4), np.int32)).logits)


def test_model_that_is_not_one_decoder_refuses_batch_invariant() -> None:
    config = registry.get_config("t5")(batch_invariant=True)
    module = registry.get_module(TaskType.SEQUENCE_TO_SEQUENCE, "t5")
    with pytest.raises(ConfigError, match="not a causal language model"):
        nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0)))


@pytest.mark.nightly
@pytest.mark.parametrize(("model_type", "dtype"), equal_rows())
def test_bits_of_a_family_are_equal_under_every_condition(model_type: str, dtype: str) -> None:
    cells = cells_of(model_type, dtype)
    # A condition that was not run for the table must be equal, too.
    assert cells == {**dict.fromkeys(cells, "equal"), **read()[model_type][dtype]}
