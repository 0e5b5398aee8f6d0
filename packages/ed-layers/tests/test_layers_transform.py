"""Sub-modules are replaced by rules over their names, in any storage; names do not change."""

import depth_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra import parameter_names
from ed_infra.errors import ConfigError
from ed_infra.rules import Rules
from ed_layers.projections.linear import Linear
from ed_layers.transform import transform
from flax import nnx


class Shifted(nnx.Module):
    """`base(x) + shift`, with a shift drawn from the key, similar to an adapter."""

    def __init__(self, base, key):
        self.base = base
        width = base.kernel.get_value().shape[-1]
        self.shift = nnx.LoRAParam(jax.random.normal(key, (width,)), axes=(None,))

    def __call__(self, x, ctx=None):
        return self.base(x, ctx) + self.shift.get_value()


class Model(nnx.Module):
    def __init__(self, stack):
        self.layers = stack

    def __call__(self, x):
        return self.layers(x, case.context())[0]


def model(scan, **options):
    return Model(case.stack(4, scan=scan, **options))


def rules(*patterns):
    return Rules([(pattern, Shifted) for pattern in patterns], kind="adapter rule")


def outputs(of):
    graphdef, state = nnx.split(of)
    return np.asarray(jax.jit(lambda s, x: nnx.merge(graphdef, s)(x))(state, jnp.asarray(case.X)))


def names(of):
    flat = nnx.to_flat_state(nnx.state(of))
    return sorted(name for path, _ in flat for name in parameter_names.canonical(path))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("patterns", "runs"),
    [
        ((r"\.q$", r"mlp\.up_proj$"), ["run_0_4_1"]),
        ((r"layers\.2\.q$",), ["run_0_2_1", "run_2_1_1", "run_3_1_1"]),
        ((r"layers\.[13]\.mlp",), ["run_0_4_2"]),
    ],
    ids=["every layer", "one layer", "every other layer"],
)
def test_transformed_scanned_model_matches_unrolled_model(patterns, runs):
    scanned = transform(model(True), rules(*patterns), key=jax.random.key(7), of=Linear)
    unrolled = transform(model(False), rules(*patterns), key=jax.random.key(7), of=Linear)
    assert [run.name for run in scanned.layers.runs] == runs
    assert names(scanned) == names(unrolled)
    assert any("shift" in name for name in names(scanned))
    case.assert_near(outputs(scanned), outputs(unrolled))
    assert np.abs(outputs(scanned) - outputs(model(True))).max() > 0.1


def test_transform_leaves_original_model_unchanged():
    original = model(True)
    before = outputs(original)
    changed = transform(original, rules(r"\.q$"), of=Linear)
    np.testing.assert_array_equal(outputs(original), before)
    kernel = ["layers", "run_0_4_1", "0", "mlp", "up_proj", "kernel"]
    find = lambda of: dict(nnx.to_flat_state(nnx.state(of)))[  # noqa: E731
        tuple(int(part) if part.isdigit() else part for part in kernel)
    ]
    assert find(changed).get_value() is find(original).get_value()


def test_a_rule_for_nothing_is_an_error():
    with pytest.raises(ConfigError, match=r"adapter rule 'quu' matches no"):
        transform(model(True), rules(r"\.q$", "quu"), of=Linear)


def test_first_matching_adapter_rule_wins():
    keep = Rules([(r"layers\.0\.q$", None), (r"\.q$", Shifted)], kind="adapter rule")
    changed = transform(model(False), keep, of=Linear)
    assert isinstance(changed.layers.layer_0.q, Linear)
    assert isinstance(changed.layers.layer_1.q, Shifted)
