"""Canonical names of parameters do not depend on how layers are stored."""

from __future__ import annotations

import jax
import pytest
from ed_infra import parameter_names
from hypothesis import given
from hypothesis import strategies as st


def test_canonical_paths_cover_all_storage_forms():
    tail = ("self_attn", "q_proj", "kernel")
    name = "model.layers.{}.self_attn.q_proj.kernel"
    stacked = parameter_names.canonical(("model", "layers", "run_0_30_1", 0, *tail))
    assert stacked == [name.format(i) for i in range(30)]
    period = parameter_names.canonical(("model", "layers", "run_0_30_6", 2, *tail))
    assert period == [name.format(i) for i in (2, 8, 14, 20, 26)]
    assert parameter_names.canonical(("model", "layers", "layer_3", *tail)) == [name.format(3)]
    assert parameter_names.canonical(("model", "norm", "weight")) == ["model.norm.weight"]


def test_stacked_paths_are_recognized():
    assert parameter_names.is_stacked(("layers", "run_2_4_2", 1, "a"))
    assert not parameter_names.is_stacked(("layers", "layer_2", "a"))
    assert parameter_names.parse_run("run_2_4_2") == parameter_names.Run(2, 4, 2)
    assert parameter_names.Run(2, 4, 2).name == "run_2_4_2"


@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 4))
def test_the_entries_of_a_run_are_its_layers_each_once(start: int, repeats: int, period: int):
    run = parameter_names.Run(start, repeats * period, period)
    found = [i for index in range(period) for i in run.layers(index)]
    assert sorted(found) == list(range(start, start + run.length))


def test_keys_of_jax_paths_become_plain():
    tree = {"layers": {"layer_1": [1.0, 2.0]}}
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    assert [parameter_names.normalize_parameter_name(path) for path, _ in leaves] == [
        ("layers", "layer_1", 0),
        ("layers", "layer_1", 1),
    ]
    assert parameter_names.normalize_parameter_name(("a", jax.tree_util.GetAttrKey("value"))) == (
        "a",
    )


def test_a_run_without_an_index_is_an_error():
    with pytest.raises(ValueError, match="index of a layer"):
        parameter_names.canonical(("layers", "run_0_2_1", "kernel"))
