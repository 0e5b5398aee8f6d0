"""Rules over the names of parameters: order, use, stacked layers, and values laid over a state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra import ConfigError, Rules
from flax import nnx

NAMES = ["model.embed.kernel", "model.layers.3.self_attn.q_proj.kernel", "model.norm.scale"]


class Model(nnx.Module):
    """Layers 0 to 3 as two stacks of two (period 2), layer 4 on its own."""

    def __init__(self) -> None:
        def node(*shape: int) -> nnx.Module:
            module = nnx.Module()
            module.kernel = nnx.Param(jnp.ones(shape))
            module.bias = nnx.Param(jnp.ones(shape[-1:]))
            return module

        self.embed = node(4, 2)
        self.layers = nnx.Module()
        self.layers.run_0_4_2 = nnx.List([node(2, 2, 2), node(2, 2, 2)])
        self.layers.layer_4 = node(2, 2)


def test_the_first_rule_that_matches_decides():
    rules = Rules([("q_proj", 1), ("kernel$", 2)], kind="rule")
    assert [rules.match(name) for name in NAMES] == [("kernel$", 2), ("q_proj", 1), None]
    assert rules and not Rules([], kind="rule")
    rules.check_used()


@pytest.mark.parametrize("pattern", [r"layers/\d+/self_attn", r"layers\.\d+\.self_attn", "3.self"])
def test_rules_match_names_with_either_separator(pattern: str):
    assert Rules([(pattern, 1)], kind="rule").match(NAMES[1]) == (pattern, 1)


def test_a_rule_behind_another_counts_as_used():
    rules = Rules([(".*", 1), ("q_proj", 2)], kind="rule")
    assert [rules.match(name) for name in NAMES] == [(".*", 1)] * 3
    rules.check_used()


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("q_porj", "; did you mean 'q_proj'?"),
        (r"layers/\d+/self_atn/q_proj", "; did you mean 'layers.self_attn.q_proj'?"),
        (".*norms.scale$", "; did you mean 'norm.scale'?"),
        ("quite_another_thing", ""),
        (".^", ""),
    ],
)
def test_a_rule_that_matches_nothing_names_the_nearest(pattern: str, hint: str):
    rules = Rules([(".*", 0), (pattern, 1)], kind="decay rule")
    for name in NAMES:
        rules.match(name)
    with pytest.raises(ConfigError) as caught:
        rules.check_used()
    assert str(caught.value) == (
        f"decay rule {pattern!r} matches no parameter{hint}. Names look like model.embed.kernel"
    )
    with pytest.raises(ConfigError, match="there are no parameters"):
        Rules([("x", 1)], kind="rule").check_used()


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ([("a(", 1)], r"decay rule 'a\(' is not a pattern"),
        (["ab", "abc"], "a decay rule is a pair .* got 'abc'"),
        ([(3, 1)], r"a decay rule is a pair .* got \(3, 1\)"),
    ],
)
def test_invalid_rules_raise_config_error(rules: list, says: str):
    with pytest.raises(ConfigError, match=says):
        Rules(rules, kind="decay rule")


def test_layers_in_one_array_share_a_value():
    path = ("layers", "run_0_4_2", 0, "kernel")  # layers 0 and 2
    assert Rules([("layers.[02]", 7)], kind="rule").at(path, 0) == 7
    assert Rules([("layers.0", 7), ("layers.2", 7)], kind="rule").at(path, 0) == 7
    assert Rules([("layers.0", 0)], kind="rule").at(path, 0) == 0
    says = r"layers.0.kernel 7 \('layers.0'\) and layers.2.kernel 0 \('no rule'\).*one stacked"
    with pytest.raises(ConfigError, match=says):
        Rules([("layers.0", 7)], kind="rule").at(path, 0)
    assert Rules([("layers.4", 7)], kind="rule").at(("layers", "layer_4", "kernel"), 0) == 7


def test_values_laid_over_a_state():
    params = nnx.state(Model())
    tree = Rules([("bias$", 0.0), ("embed", 2.0)], kind="rate").tree(params, 1.0)
    scaled = jax.tree.map(lambda rate, value: rate * value, tree, params)
    assert float(scaled["embed"]["kernel"][...].max()) == 2.0
    assert float(scaled["layers"]["run_0_4_2"][1]["kernel"][...].min()) == 1.0
    assert float(scaled["layers"]["layer_4"]["bias"][...].max()) == 0.0
    plain = {"embed": {"kernel": np.ones(3)}, "bias": np.ones(3)}
    assert Rules([("bias", "b")], kind="label").tree(plain) == {
        "embed": {"kernel": None},
        "bias": "b",
    }
    with pytest.raises(ConfigError, match="rate 'gate' matches no parameter"):
        Rules([("gate", 0.0)], kind="rate").tree(params)


def test_a_filter_takes_variables_apart():
    rules = Rules([("embed.bias", False), ("bias$", True)], kind="trainable rule")
    graphdef, learns, rest = nnx.split(Model(), rules.filter(), ...)
    rules.check_used()
    paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(learns)]
    assert paths == ["layers.layer_4.bias", "layers.run_0_4_2.0.bias", "layers.run_0_4_2.1.bias"]
    assert len(nnx.to_flat_state(rest)) == 5
    assert isinstance(nnx.merge(graphdef, learns, rest), Model)
