"""Properties of meshes, specs, rules and files, for values that hypothesis chooses."""

from __future__ import annotations

import json
import math
import re
import tempfile
from pathlib import Path

import pytest
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError, MeshError
from ed_infra.sharding import placement
from ed_infra.sharding.axes import ACTIVATION_AXES, AXIS_NAMES, PARAM_AXES, PartitionAxis
from ed_infra.sharding.mesh import create_mesh, resolve_axis_dims
from ed_infra.sharding.partition import PartitionManager, fit_spec
from ed_infra.testing import tiny_llama
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P


class LlamaConfig(EasyDeLBaseConfig, transformers.LlamaConfig):
    model_type = "llama"


class OwnConfig(EasyDeLBaseConfig):
    """A configuration with `__init__`, as in the guide."""

    model_type = "own"

    def __init__(self, width: int = 3, **kwargs):
        super().__init__(**kwargs)
        self.width = width


sizes = st.tuples(*[st.integers(1, 6)] * 5)
meshes = sizes.map(lambda dims: AbstractMesh(dims, AXIS_NAMES))
mesh_axes = st.one_of(
    st.none(),
    st.sampled_from(AXIS_NAMES),
    st.lists(st.sampled_from(AXIS_NAMES), unique=True, min_size=1, max_size=3).map(tuple),
)
placed = [name for name in PartitionAxis.__dataclass_fields__ if not name.endswith("parallel_axis")]
managers = st.dictionaries(st.sampled_from(placed), mesh_axes).map(
    lambda fields: PartitionManager(PartitionAxis(**fields))
)


def used(spec: P) -> list[str]:
    """The mesh axes of a spec, in order."""
    return [axis for e in spec for axis in ((e,) if isinstance(e, str) else e or ())]


# --- mesh arithmetic ------------------------------------------------------------------------------


@given(st.tuples(*[st.integers(-2, 12)] * 5), st.integers(1, 64))
def test_sizes_resolve_to_a_mesh_that_fits_or_are_refused(dims: tuple[int, ...], count: int):
    fixed = math.prod(d for d in dims if d != -1)
    fits = all(d >= 1 or d == -1 for d in dims) and dims.count(-1) <= 1
    if not (fits and (count % fixed == 0 if -1 in dims else fixed <= count)):
        with pytest.raises(MeshError, match="dp="):  # the sizes are in the message
            resolve_axis_dims(dims, count)
        return
    resolved = resolve_axis_dims(dims, count)
    assert math.prod(resolved) == count if -1 in dims else math.prod(resolved) <= count
    assert all(d in (-1, r) for d, r in zip(dims, resolved, strict=True))
    assert resolve_axis_dims(resolved, count) == resolved


@given(st.permutations([1, 1, 1, 2, 4]), st.permutations([1, 1, 1, 1, 2]))
def test_slices_multiply_the_axes_and_use_each_device_once(inner: list[int], outer: list[int]):
    inner = [max(1, d // 2) if d == 4 else d for d in inner]  # four devices in each of two slices
    mesh = create_mesh(inner, dcn_dims=outer)
    assert list(mesh.shape.values()) == [i * o for i, o in zip(inner, outer, strict=True)]
    assert len({device.id for device in mesh.devices.flat}) == 8
    axis = outer.index(2)
    first = mesh.devices.take(range(inner[axis]), axis=axis)
    assert {device.id for device in first.flat} == {0, 1, 2, 3}


# --- from names of axes to specs ------------------------------------------------------------------


@given(
    managers,
    meshes,
    st.lists(st.tuples(st.sampled_from([None, *ACTIVATION_AXES]), st.integers(1, 48)), max_size=5),
    st.sampled_from(["train", "prefill", "decode"]),
)
def test_resolved_specs_are_legal_placements(manager, mesh, dims, mode):
    axes, shape = [name for name, _ in dims], tuple(size for _, size in dims)
    spec = manager.resolve(axes, mode, shape, mesh)
    NamedSharding(mesh, spec).shard_shape(shape)  # raises where a dimension does not divide
    assert len(set(used(spec))) == len(used(spec))
    assert all(mesh.shape[axis] > 1 for axis in used(spec))
    # Sizes only remove indivisible axes. Without sizes the spec is valid for any shape.
    free = manager.resolve(axes, mode)
    assert len(free) == len(axes) and set(used(spec)) <= set(used(free))
    assert fit_spec(free, shape, mesh)[0] == spec == fit_spec(spec, shape, mesh)[0]
    if mode == "prefill":
        assert spec == manager.resolve(axes, "train", shape, mesh)


@given(managers, st.lists(st.sampled_from(list(PARAM_AXES)), max_size=4))
def test_a_parameter_uses_each_mesh_axis_once(manager, axes):
    spec = manager.param(axes)
    assert len(spec) == len(axes) and len(set(used(spec))) == len(used(spec))


# --- rules ----------------------------------------------------------------------------------------


class Tree(nnx.Module):
    """An embedding and three layers, with the names of a stack's leaves."""

    def __init__(self):
        def kernel(*axes):
            node = nnx.Module()
            node.kernel = nnx.Param(nnx.initializers.zeros(None, (8, 8)), axes=axes)
            return node

        self.embed = kernel("vocab", "embed")
        self.layer_0, self.layer_1, self.layer_2 = (kernel("embed", "mlp") for _ in range(3))


NAMES = ["embed.kernel", "0.kernel", "1.kernel", "2.kernel"]
entries = st.sampled_from([None, "fsdp", "tp", ("fsdp", "tp"), "dp"])
rules = st.lists(
    st.tuples(
        st.sampled_from(["embed", r"^\d", "kernel", "[02].kernel", "1/kernel", "nowhere", ".*"]),
        st.tuples(entries, entries).map(lambda e: P(*e)),
    ),
    max_size=4,
)


@given(rules)
def test_the_first_rule_that_matches_decides_and_each_must_match(chosen):
    config = EasyDeLBaseConfig(sharding_axis_dims=(1, 4, 1, 2, 1))
    mesh = AbstractMesh((2, 2, 1, 2, 1), AXIS_NAMES)
    state = nnx.state(nnx.eval_shape(Tree))
    twice = any(len(set(used(spec))) < len(used(spec)) for _, spec in chosen)
    if twice or any(pattern == "nowhere" for pattern, _ in chosen):
        with pytest.raises(ConfigError, match="twice" if twice else "matches no parameter"):
            placement.specs(state, config, mesh, chosen)
        return
    specs = placement.specs(state, config, mesh, chosen)
    flat = [spec for _, spec in nnx.to_flat_state(specs)]
    derived = [config.partition_manager.param(axes) for axes in [("vocab", "embed")]]
    derived += [config.partition_manager.param(("embed", "mlp"))] * 3
    for name, default, spec in zip(NAMES, derived, flat, strict=True):
        forms = (name, name.replace(".", "/"))
        hits = [s for pattern, s in chosen if any(re.search(pattern, form) for form in forms)]
        assert spec == fit_spec(hits[0] if hits else default, (8, 8), mesh)[0]


# --- files ----------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(min_size=1, max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
unknown = st.dictionaries(
    st.from_regex(r"of_the_hub_[a-z]{1,6}", fullmatch=True), json_values, max_size=3
)
execution = st.fixed_dictionaries(
    {},
    optional={
        "attn_mechanism": st.sampled_from(["vanilla", "ring", "splash", "auto"]),
        "sharding_axis_dims": st.permutations([1, -1, 1, 2, 1]).map(tuple),
        "blocksize_q": st.integers(1, 4096),
        "attn_dtype": st.sampled_from(["bf16", "float32", None]),
        "gradient_checkpointing": st.sampled_from(["", "nothing_saveable"]),
        "partition_axis": mesh_axes.map(lambda axes: PartitionAxis(head_axis=axes)),
        "scan_layers": st.booleans(),
        "sharding_rules": st.just((("embed", ("fsdp", None)),)),
    },
)
architecture = st.fixed_dictionaries(
    {},
    optional={
        "num_hidden_layers": st.integers(1, 99),
        "rms_norm_eps": st.floats(1e-8, 1e-2),
        "tie_word_embeddings": st.booleans(),
        "hidden_act": st.sampled_from(["silu", "gelu"]),
        "rope_theta": st.floats(1, 1e7),
        "eos_token_id": st.integers(0, 99) | st.lists(st.integers(0, 99), min_size=1, max_size=3),
    },
)


@given(unknown, execution, architecture)
def test_saved_config_equals_loaded_config(unknown, execution, architecture):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = {**tiny_llama(), **architecture, **unknown}
        (folder / "config.json").write_text(json.dumps(file))
        config = LlamaConfig.from_pretrained(folder, **execution)
        config.save_pretrained(folder / "out")
        written = json.loads((folder / "out/config.json").read_text())
        again = LlamaConfig.from_pretrained(folder / "out")
        theirs = transformers.AutoConfig.from_pretrained(folder / "out")
    assert again == config and hash(again) == hash(config)
    assert {key: written[key] for key in unknown} == unknown
    for key, value in execution.items():
        assert getattr(again, key) == getattr(LlamaConfig(**{key: value}), key)
    # transformers reads the same architecture, and is not disturbed by our section.
    assert type(theirs) is transformers.LlamaConfig
    for key in {*file} - {"model_type", "rope_theta"}:
        assert getattr(theirs, key) == getattr(config, key) == file[key], key
    assert theirs.rope_parameters == config.rope_parameters


@given(st.integers(-(2**40), 2**40), execution, unknown)
def test_a_class_with_its_own_init_is_saved_and_loaded(width, execution, unknown):
    config = OwnConfig(width=width, **execution)
    config.attach_custom_arguments(**unknown)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        again = OwnConfig.from_pretrained(folder)
    assert again == config and again.width == width
    for key, value in unknown.items():
        assert getattr(again, key) == value
    assert config.replace(width=width + 1) != config == config.replace()
