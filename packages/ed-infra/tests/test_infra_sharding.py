"""Sharding: from logical axes, over stacks, with rules, and modules that are created sharded."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError, MeshError
from ed_infra.logging import forget_said
from ed_infra.sharding import placement
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


class Dense(nnx.Module):
    def __init__(self, shape, axes, *, rngs):
        self.kernel = nnx.Param(nnx.initializers.normal()(rngs.params(), shape), axes=axes)


class Layer(nnx.Module):
    def __init__(self, *, rngs):
        self.up = Dense((16, 32), ("embed", "mlp"), rngs=rngs)
        self.down = Dense((32, 6), ("mlp", "embed"), rngs=rngs)


class Layers(nnx.Module):
    """Layers 0–3 stacked with period 2, layer 4 on its own."""

    def __init__(self, *, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def stacked(rngs):
            return Layer(rngs=rngs)

        self.run_0_4_2 = nnx.List([stacked(rngs), stacked(rngs)])
        self.layer_4 = Layer(rngs=rngs)


class Model(nnx.Module):
    def __init__(self, config, *, rngs):
        self.config = config
        self.embed = Dense((64, 16), ("vocab", "embed"), rngs=rngs)
        self.layers = Layers(rngs=rngs)
        self.scale = nnx.Param(jnp.ones(3))


class RuleConfig(EasyDeLBaseConfig):
    model_type = "rules"

    def get_partition_rules(self, fully_sharded: bool = True):
        return (("embed/kernel", P("tp", "fsdp")), (".*", P()))


@pytest.fixture
def config():
    return EasyDeLBaseConfig(sharding_axis_dims=(1, 4, 1, 2, 1)).seal()


def build(config):
    return lambda: Model(config, rngs=nnx.Rngs(0))


def spec_of(tree, *path):
    for key in path:
        tree = tree[key]
    return tree


def test_specs_follow_logical_axes_with_the_layer_dimension_left_whole(config):
    specs = placement.specs(nnx.eval_shape(build(config)), config)
    assert spec_of(specs, "embed", "kernel") == P("tp", "fsdp")
    assert spec_of(specs, "layers", "run_0_4_2", 1, "up", "kernel") == P(None, "fsdp", "tp")
    assert spec_of(specs, "layers", "layer_4", "up", "kernel") == P("fsdp", "tp")
    assert spec_of(specs, "scale") == P()


def test_indivisible_dimension_is_replicated_with_one_warning(config, caplog):
    forget_said()
    with caplog.at_level(logging.WARNING, logger="easydel"):
        for _ in range(2):
            specs = placement.specs(nnx.eval_shape(build(config)), config)
    assert spec_of(specs, "layers", "layer_4", "down", "kernel") == P("tp")
    said = [r.getMessage() for r in caplog.records if "(32, 6)" in r.getMessage()]
    assert len(said) == 1
    assert "layers.*.down.kernel: dimension 1" in said[0]
    assert "fsdp = 4" in said[0]


def test_sharded_module_equals_single_device_module(config):
    module = placement.create_sharded(build(config), config)
    kernel = module.layers.run_0_4_2[0].up.kernel.get_value()
    assert kernel.sharding == NamedSharding(config.mesh, P(None, "fsdp", "tp"))
    assert kernel.addressable_shards[0].data.shape == (2, 4, 16)
    assert module.config is config
    single = EasyDeLBaseConfig(sharding_axis_dims=(1, 1, 1, 1, 1))
    alone = placement.create_sharded(build(single), single)
    pairs = zip(
        nnx.to_flat_state(nnx.state(module)), nnx.to_flat_state(nnx.state(alone)), strict=True
    )
    for (path, a), (_, b) in pairs:
        # The same random bits; the last bit of their transformation may be compiled differently.
        np.testing.assert_allclose(
            np.asarray(a[...]), np.asarray(b[...]), rtol=5e-7, atol=0, err_msg=str(path)
        )


def test_shard_after_gather_restores_parameters(config):
    module = placement.create_sharded(build(config), config)
    gathered = placement.gather(module, config)
    assert gathered.embed.kernel.get_value().sharding.is_fully_replicated
    again = placement.shard(gathered, config)
    assert again.embed.kernel.get_value().sharding.spec == P("tp", "fsdp")
    np.testing.assert_array_equal(again.embed.kernel[...], module.embed.kernel[...])


@pytest.mark.parametrize("pattern", [r"layers/\d+/up/kernel", r"layers\.\d+\.up\.kernel", "up"])
def test_rules_match_the_canonical_path_of_a_layer(config, pattern):
    specs = placement.specs(
        nnx.eval_shape(build(config)), config, overrides=[(pattern, P("tp", None))]
    )
    assert spec_of(specs, "layers", "run_0_4_2", 0, "up", "kernel") == P(None, "tp")
    assert spec_of(specs, "layers", "layer_4", "up", "kernel") == P("tp")
    assert spec_of(specs, "embed", "kernel") == P("tp", "fsdp")


def test_first_matching_sharding_rule_wins(config):
    overrides = [("layers/[02]/up", P("tp")), ("layers/.*/up", P("fsdp"))]
    specs = placement.specs(nnx.eval_shape(build(config)), config, overrides=overrides)
    assert spec_of(specs, "layers", "run_0_4_2", 0, "up", "kernel") == P(None, "tp")
    assert spec_of(specs, "layers", "run_0_4_2", 1, "up", "kernel") == P(None, "fsdp")


@pytest.mark.parametrize(
    ("rule", "error", "says"),
    [
        (("layer/up", P("tp")), ConfigError, "matches no parameter.*Names look like"),
        (("layers.2.up", P("tp")), ConfigError, "one stacked array.*scan_layers: false"),
        (("layers.4.up", P("fdsp")), ConfigError, "mesh axis 'fdsp'; did you mean 'fsdp'"),
        (("layers.4.up", P(None, None, "tp")), MeshError, r"layers\.4\.up\.kernel: .*3 entries"),
        (("layers.(up", P("tp")), ConfigError, "is not a pattern"),
        (("layers.4.up", [["fsdp", "tp"], "tp"]), ConfigError, "mesh axis 'tp' twice"),
    ],
)
def test_unsatisfiable_sharding_rules_raise_error(config, rule, error, says):
    state = nnx.eval_shape(build(config))
    with pytest.raises(error, match=says):
        placement.specs(state, config, overrides=[rule])


def test_config_sharding_rules_override_defaults():
    rules = [["embed.kernel", ["fsdp", None]]]
    config = EasyDeLBaseConfig(sharding_axis_dims=(1, 4, 1, 2, 1), sharding_rules=rules)
    assert spec_of(placement.specs(nnx.eval_shape(build(config)), config), "embed", "kernel") == P(
        "fsdp"
    )
    config = RuleConfig(sharding_axis_dims=(1, 4, 1, 2, 1))
    specs = placement.specs(nnx.eval_shape(build(config)), config)
    assert spec_of(specs, "embed", "kernel") == P("tp", "fsdp")
    assert spec_of(specs, "layers", "layer_4", "up", "kernel") == P()


def test_the_view_as_rules_gives_the_same_sharding(config):
    state = nnx.eval_shape(build(config))
    rules = placement.build_partition_rules(state, config)
    assert (r"^layers\.\d+\.up\.kernel$", P("fsdp", "tp")) in rules
    derived = nnx.to_flat_state(placement.specs(state, config))
    again = nnx.to_flat_state(placement.specs(state, config, overrides=rules))
    assert list(derived) == list(again)


def test_logical_axes_are_read_from_parameters(config):
    axes = placement.list_logical_axes(nnx.eval_shape(build(config)))
    assert axes["layers", "run_0_4_2", 0, "up", "kernel"] == ("embed", "mlp")
    assert axes["scale",] is None


def test_constrain_applies_sharding_to_activations(config):
    x = jnp.ones((8, 4, 16))
    axes = ("batch", "sequence", "mlp")
    y = jax.jit(lambda x: placement.constrain(x, axes, config))(x)
    assert y.sharding.is_equivalent_to(NamedSharding(config.mesh, P("fsdp", None, "tp")), 3)
    single = EasyDeLBaseConfig(sharding_axis_dims=(1, 1, 1, 1, 1))
    assert placement.constrain(x, axes, single) is x
    with pytest.raises(ConfigError, match="2 axes"):
        placement.constrain(x, ("batch", "mlp"), config)


def test_a_global_batch_is_placed_row_by_row(config):
    batch = {"ids": np.arange(48).reshape(8, 6), "steps": np.arange(3), "scalar": np.float32(2)}
    where = NamedSharding(config.mesh, P(("fsdp", "dp"), "sp"))
    placed = placement.make_global(batch, where)
    assert placed["ids"].addressable_shards[0].data.shape == (2, 6)
    for name in batch:
        np.testing.assert_array_equal(placed[name], batch[name])
    same = placement.make_global(batch, dict.fromkeys(batch, where))
    assert same["ids"].sharding == placed["ids"].sharding


def test_a_process_gives_its_own_rows(config):
    rows = np.arange(48).reshape(8, 6)
    where = NamedSharding(config.mesh, P(("fsdp", "dp"), "sp"))
    assert placement.local_rows(where, 8) == slice(0, 8)  # one process holds all of them
    own = placement.make_global({"ids": rows}, where, rows=8)["ids"]
    np.testing.assert_array_equal(own, rows)
    assert own.sharding == placement.make_global(rows, where).sharding
    stacked = rows.reshape(2, 4, 6)
    where = NamedSharding(config.mesh, P(None, ("fsdp", "dp"), "sp"))
    assert placement.local_rows(where, 4, axis=1) == slice(0, 4)
    own = placement.make_global(stacked, where, rows=4, axis=1)
    np.testing.assert_array_equal(own, stacked)
    assert own.sharding == placement.make_global(stacked, where).sharding
    where = NamedSharding(config.mesh, P(("fsdp", "dp"), "sp"))
    with pytest.raises(ConfigError, match=r"shape \(4, 6\) .* pass these 8 rows"):
        placement.make_global(rows[:4], where, rows=8)
