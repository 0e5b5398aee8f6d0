"""Training checkpoints of EasyDeL: weights, step, and the moments of AdamW."""

import json

import jax
import numpy as np
import optax
import pytest
from ed_infra.errors import CheckpointError, ConfigError
from ed_models.checkpoints.easydel_folder import (
    list_easydel_arrays,
    read_easydel_moments,
    read_easydel_step,
)
from ed_models.checkpoints.zarr_arrays import write_zarr
from ed_trainers import EasyDeLState
from ed_trainers.checkpoints.easydel_state import continue_easydel_run, restore_easydel_moments
from ed_trainers.convert import convert
from ed_trainers.stored.arrays import flat_arrays
from flax import nnx

RNG = np.random.default_rng(0)
CONFIG = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "sharding_axis_dims": [1, 1, 1, 1, 1],
    "easy_method": "train",
}
LAYER = {
    **dict.fromkeys(("self_attn.q_proj.kernel", "self_attn.o_proj.kernel"), (8, 8)),
    **dict.fromkeys(("self_attn.k_proj.kernel", "self_attn.v_proj.kernel"), (8, 4)),
    **dict.fromkeys(("mlp.gate_proj.kernel", "mlp.up_proj.kernel"), (8, 12)),
    "mlp.down_proj.kernel": (12, 8),
    **dict.fromkeys(("input_layernorm.kernel", "post_attention_layernorm.kernel"), (8,)),
}
SHAPES = {
    "model.embed_tokens.embedding": (16, 8),
    "model.norm.kernel": (8,),
    "lm_head.kernel": (8, 16),
    **{f"model.layers.0.{name}": shape for name, shape in LAYER.items()},
}
QUERY = "model.layers.0.self_attn.q_proj"


def values(shape):
    return RNG.normal(size=shape).astype(np.float32)


def write_state(folder, weights, optimizer, step=None):
    """Write a folder as `save_state` of EasyDeL does: name with dots -> values."""
    prefixes = {"model": weights, "tx": optimizer}
    index = {}
    for prefix, arrays in prefixes.items():
        index[prefix] = []
        for name, array in arrays.items():
            path = "/".join([prefix, *name.split(".")])
            write_zarr(folder / path, np.asarray(array))
            index[prefix].append({"path": path, "shape": list(np.shape(array))})
    (folder / "tensorstore_index.json").write_text(json.dumps({"prefixes": index}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if step is not None:
        (folder / "metadata.json").write_text(json.dumps({"step": step}))
    return folder


def adam_arrays(mu, nu, place="0"):
    moments = {"mu": mu, "nu": nu}
    return {
        f"{place}.count": np.int32(7),
        **{f"{place}.{k}.{n}.value": v for k, tree in moments.items() for n, v in tree.items()},
    }


WEIGHTS = {name: values(shape) for name, shape in SHAPES.items()}
MU = {name: values(shape) for name, shape in SHAPES.items()}
NU = {name: values(shape) ** 2 for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "tiny" / "run-9"
    counts = {"0.2.count": np.int32(9), "1.count": np.int32(9)}
    return write_state(run, WEIGHTS, {**adam_arrays(MU, NU, "0.0"), **counts}, step=9)


@pytest.fixture(scope="module")
def state(folder):
    return EasyDeLState.load_state(folder, tx=optax.adamw(1e-2))


def find_query(tree):
    (array,) = [x for name, x in flat_arrays(tree).items() if "q_proj/kernel" in name]
    return np.asarray(array).reshape(8, 8)


def test_state_has_moments_count_and_step_of_the_folder(state):
    adam = state.opt_state[0]
    assert (int(state.step), int(adam.count)) == (9, 7)
    np.testing.assert_array_equal(find_query(state.graphstate), WEIGHTS[f"{QUERY}.kernel"])
    np.testing.assert_array_equal(find_query(adam.mu), MU[f"{QUERY}.kernel"])
    np.testing.assert_array_equal(find_query(adam.nu), NU[f"{QUERY}.kernel"])


def test_next_update_is_that_of_adamw(state):
    """Against the formula of Loshchilov and Hutter, with the 8th update of these moments."""
    gradient = 0.5
    grads = jax.tree.map(lambda x: x * 0 + gradient, state.graphstate)
    after = find_query(state.apply_gradients(grads=grads).graphstate)
    weight, mu, nu = (x[f"{QUERY}.kernel"].astype(np.float64) for x in (WEIGHTS, MU, NU))
    mu, nu = 0.9 * mu + 0.1 * gradient, 0.999 * nu + 0.001 * gradient**2
    direction = mu / (1 - 0.9**8) / (np.sqrt(nu / (1 - 0.999**8)) + 1e-8)
    np.testing.assert_allclose(after, weight - 1e-2 * (direction + 1e-4 * weight), atol=1e-6)


def test_run_of_the_save_directory_continues(state, folder):
    """EasyDeL's trainer writes `<save_directory>/<model_name>/run-<step>`."""
    new = EasyDeLState.create(model=state.model, tx=optax.adamw(1e-2), init_opt_state=True)
    new = new.replace(graphstate=jax.tree.map(lambda x: x * 0, new.graphstate))
    messages = []
    continued = continue_easydel_run(new, folder.parent.parent, messages.append)
    expected = (state.step, state.graphstate, state.opt_state)
    found = (continued.step, continued.graphstate, continued.opt_state)
    assert all(map(np.array_equal, jax.tree.leaves(expected), jax.tree.leaves(found)))
    assert f"{folder}, which EasyDeL saved, from step 9" in messages[0]


def test_directory_without_runs_changes_nothing(state, tmp_path):
    (tmp_path / "run-3").mkdir()
    assert continue_easydel_run(state, tmp_path, print) is state


HEAD = {"lm_head.kernel": values((8, 16))}


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({}, "no optimizer"),
        ({"0.count": np.int32(1), "0.mu.lm_head.kernel.value": values(4)}, "another"),
        ({"0.v_row.lm_head.kernel.value": values(4)}, r"another .*v_row"),
        ({**adam_arrays(HEAD, HEAD), "1.ema.count": np.int32(1)}, r"another .*ema"),
        ({k: v for k, v in adam_arrays(HEAD, HEAD).items() if "count" not in k}, "another"),
        ({**adam_arrays(HEAD, HEAD), "0.count": np.int32(-1)}, "no number of updates"),
        (adam_arrays(HEAD, {}), "another"),
    ],
)
def test_other_optimizers_are_refused(tmp_path, optimizer, message):
    write_state(tmp_path, {}, optimizer)
    with pytest.raises(CheckpointError, match=message):
        read_easydel_moments(tmp_path)


@pytest.mark.parametrize("step", [-1, 2**31, 1.5, "9", None, True, "a" * 2**17])
def test_step_must_be_a_number_of_steps(tmp_path, step):
    (tmp_path / "metadata.json").write_text(json.dumps({"step": step}))
    with pytest.raises(CheckpointError, match=r"no number of steps|larger"):
        read_easydel_step(tmp_path, default=0)


@pytest.mark.parametrize(
    ("moments", "message"),
    [({"a.kernel": values((2, 2))}, "a.kernel"), ({"lm_head.kernel": values((4, 4))}, "shape")],
)
def test_moments_must_fit_the_model(tmp_path, state, moments, message):
    write_state(tmp_path, WEIGHTS, adam_arrays(moments, moments))
    with pytest.raises(CheckpointError, match=message):
        restore_easydel_moments(state, tmp_path)


def test_optimizer_here_must_have_moments_of_adam(state, folder):
    with pytest.raises(ConfigError, match="optimizer: adamw"):
        restore_easydel_moments(state.init_tx(optax.sgd(0.1)), folder)


def test_adapters_and_their_moments_are_read(tmp_path):
    """The optimizer of EasyDeL's LoRA has the arrays of the adapters alone."""
    adapters = {f"{QUERY}.lora_a": values((8, 2)), f"{QUERY}.lora_b": values((2, 8))}
    moved = {name.replace("q_proj.", "q_proj.base_module."): x for name, x in WEIGHTS.items()}
    moments = [{name: x * factor for name, x in adapters.items()} for factor in (2, 3)]
    write_state(tmp_path, {**moved, **adapters}, adam_arrays(*moments))
    state = EasyDeLState.load_state(tmp_path, tx=optax.adamw(1e-2))
    assert len(jax.tree.leaves(state.graphstate)) == 2
    for tree, factor in zip((state.graphstate, *state.opt_state[0][1:]), (1, 2, 3), strict=True):
        for name, array in flat_arrays(tree).items():
            expected = adapters[f"{QUERY}.{name.rpartition('/')[2]}"] * factor
            np.testing.assert_array_equal(np.asarray(array).reshape(expected.shape), expected)
    layer = nnx.merge(state.graphdef, state.graphstate, state.graphother)
    assert {x.spec.alpha for _, x in nnx.iter_modules(layer) if hasattr(x, "lora_a")} == {2}


def test_folder_is_converted_to_hugging_face_and_back(tmp_path, folder):
    model = convert(folder, tmp_path / "model")
    assert (model / "model.safetensors").is_file()
    again = convert(model, tmp_path / "again", to="easydel")
    arrays = list_easydel_arrays(again).model
    assert arrays.keys() == WEIGHTS.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array.read(), WEIGHTS[name])


def test_layout_to_write_must_fit_source_and_target(tmp_path, folder):
    with pytest.raises(ConfigError, match="easydel"):
        convert(folder, tmp_path / "a", to="easydell")
    for target in ("a.gguf", "b"):
        with pytest.raises(ConfigError, match="GGUF file"):
            convert(folder if "gguf" in target else "a.gguf", tmp_path / target, to="easydel")
