"""Named arrays with logical axes, and embeddings that replace placeholder tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.inputs import Features, Inputs


def test_arrays_keep_their_names_and_axes_through_jit():
    inputs = Inputs(
        {"input_ids": np.ones((2, 3), np.int32), "advantages": np.ones(2, np.float32)},
        {"advantages": ("batch",)},
    )
    doubled = jax.jit(lambda x: jax.tree.map(lambda a: a * 2, x))(inputs)
    assert isinstance(doubled, Inputs)
    assert list(doubled) == ["input_ids", "advantages"]
    assert doubled.get_logical_axes("advantages") == ("batch",)
    assert doubled.get_logical_axes("input_ids") == ("batch", "sequence")


def test_unknown_array_is_sharded_over_the_batch_axis_only():
    assert Inputs({"scores": np.ones((2, 4, 5))}).get_logical_axes("scores") == (
        "batch",
        None,
        None,
    )


def test_array_with_a_wrong_number_of_axes_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"input_ids has shape \(3,\)"):
        Inputs({"input_ids": np.ones(3)})


def test_select_ignores_names_without_an_array_and_replace_keeps_the_axes():
    inputs = Inputs(
        {"input_ids": np.ones((1, 2)), "w": np.ones((1, 2))}, {"w": ("batch", "sequence")}
    )
    assert list(inputs.select(["w", "pixel_values"])) == ["w"]
    assert inputs.replace(w=np.zeros((1, 2))).get_logical_axes("w") == ("batch", "sequence")


def test_the_kth_placeholder_of_a_row_gets_the_kth_feature():
    x = jnp.zeros((2, 4, 1))
    values = jnp.asarray([[[1.0], [2.0]], [[3.0], [4.0]]])
    placeholders = jnp.asarray([[False, True, True, False], [True, False, False, False]])
    out = Features.at(values, placeholders).insert(x)
    np.testing.assert_array_equal(out[..., 0], [[0, 1, 2, 0], [3, 0, 0, 0]])
