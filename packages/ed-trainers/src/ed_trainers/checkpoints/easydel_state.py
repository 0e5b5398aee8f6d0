"""Training checkpoints of EasyDeL: a run continues with their weights, step, mu, nu and count.

The moments have the names and the orientation of the weights. They are therefore read as the
weights of a second and a third model, by the rules of the family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from ed_infra.errors import CheckpointError, ConfigError
from ed_models.checkpoints import hub
from ed_models.checkpoints.checks import detect_task
from ed_models.checkpoints.easydel_folder import (
    OPTIMIZER_PREFIX,
    EasyDeLArrays,
    EasyDeLFiles,
    find_newest_run,
    list_easydel_arrays,
    read_easydel_index,
    read_easydel_moments,
    read_easydel_step,
)
from ed_models.checkpoints.loading import load_module
from ed_models.protocol import LanguageModel
from flax import nnx

from ed_trainers.state import EasyDeLState
from ed_trainers.stored.arrays import flat_abstract, flat_arrays, from_flat


def load_easydel_state(directory: Path, tx: optax.GradientTransformation | None) -> EasyDeLState:
    """Read a training checkpoint of EasyDeL, or one of its models, as a new state.

    Args:
        directory: folder of a state, a run, or a model.
        tx: optimizer with the moments of Adam, whose saved state is read. None: none is read.

    Raises:
        CheckpointError: The folder is damaged, or has the state of another optimizer.
        ConfigError: `tx` has no moments of Adam.
    """
    directory = find_newest_run(directory)
    model: LanguageModel = hub.from_pretrained(directory, task=detect_task(directory))
    state = EasyDeLState.create(model=model)
    return state if tx is None else restore_easydel_moments(state.init_tx(tx), directory)


def restore_easydel_moments(state: EasyDeLState, directory: Path) -> EasyDeLState:
    """Return a state with the optimizer and the step of a training checkpoint of EasyDeL.

    Args:
        state: has the model of the checkpoint and an optimizer state.
        directory: the training checkpoint.

    Raises:
        CheckpointError: See `read_easydel_moments`; or the moments do not fit the parameters.
        ConfigError: The optimizer of the state has no moments of Adam.
    """
    stored = read_easydel_moments(directory)
    nodes = [node for node in _list_nodes(state.opt_state) if _is_adam(node)]
    if len(nodes) != 1:
        raise ConfigError(
            f"{directory} has the moments of AdamW, and the optimizer here does not have them "
            "(or several times): set optimizer: adamw, or load the folder as a model"
        )
    (adam,) = nodes
    moments = {
        name: _read_moments(state, arrays, directory, getattr(adam, name))
        for name, arrays in (("mu", stored.mu), ("nu", stored.nu))
    }
    count = jax.device_put(jnp.asarray(stored.updates, adam.count.dtype), adam.count.sharding)
    restored = adam._replace(count=count, **moments)
    opt_state = jax.tree.map(
        lambda node: restored if _is_adam(node) else node, state.opt_state, is_leaf=_is_adam
    )
    return state.replace(opt_state=opt_state).at_step(stored.step)


def _list_nodes(opt_state: optax.OptState | None) -> list[Any]:
    return jax.tree.leaves(opt_state, is_leaf=_is_adam)


def _is_adam(node: object) -> bool:
    return isinstance(node, optax.ScaleByAdamState)


def _read_moments(
    state: EasyDeLState, arrays: EasyDeLArrays, directory: Path, template: optax.Updates
) -> optax.Updates:
    """Read moments into the structure, the dtypes and the shardings of the present ones."""
    values = _read_values(state.model, _complete(arrays, directory), directory)
    wanted = flat_abstract(template)
    missing = [name for name in wanted if name not in values]
    if missing:
        raise CheckpointError(
            f"{directory} has no moments of {len(missing)} trained parameters ({missing[0]}, …): "
            "train the parameters that EasyDeL trained (trainable), or load the folder as a model"
        )
    placed = {
        name: jax.device_put(values[name].astype(leaf.dtype), leaf.sharding)
        for name, leaf in wanted.items()
    }
    return from_flat(template, placed)


def _complete(arrays: EasyDeLArrays, directory: Path) -> EasyDeLArrays:
    """Return moments with the weights in the place of those of frozen parameters.

    The optimizer of a model with LoRA has the moments of its adapters alone.
    """
    weights = list_easydel_arrays(directory).model
    unknown = [name for name in arrays.model if name not in weights]
    if unknown:
        raise CheckpointError(
            f"{directory} has moments of {unknown[0]}, which its model does not have: it is damaged"
        )
    return EasyDeLArrays({**weights, **arrays.model}, arrays.adapters)


def _read_values(
    model: LanguageModel, arrays: EasyDeLArrays, directory: Path
) -> Mapping[str, jax.Array]:
    """Return arrays of EasyDeL under the names of the model's variables."""
    files = EasyDeLFiles.relate(arrays, directory)
    module = load_module(type(model), model.config, files, dtype=jnp.float32)
    adapters = files.read_adapters()
    if adapters:
        from ed_models.adapters.peft import attach_adapter_matrices

        module = attach_adapter_matrices(cast(nnx.Module, module), adapters, directory)
    return flat_arrays(nnx.state(module))


def continue_easydel_run(
    state: EasyDeLState, save_directory: Path, say: Callable[[str], None]
) -> EasyDeLState:
    """Return a state that continues the newest run of EasyDeL's trainer in a directory.

    EasyDeL's trainer writes `<save_directory>/<model_name>/run-<step>`. Without such a folder, the
    state is returned unchanged.

    Args:
        state: the state of a new run, with an optimizer state.
        save_directory: the directory of the run.
        say: prints a message.

    Raises:
        ConfigError: Several models have runs there, or the optimizer here is another one.
        CheckpointError: The newest run is damaged, or does not fit the model.
    """
    folders = (save_directory, *sorted(save_directory.iterdir()))
    parents = [folder for folder in folders if not folder.is_symlink() and _has_runs(folder)]
    if len(parents) > 1:
        raise ConfigError(
            f"{save_directory} has runs of EasyDeL of several models "
            f"({', '.join(folder.name for folder in parents[:5])}): set save_directory to the "
            "folder of one of them, or to a new folder"
        )
    if not parents:
        return state
    directory = find_newest_run(parents[0])
    state = _replace_weights(state, directory)
    if state.tx is not None:
        state = state.init_tx(state.tx)  # also the float32 copies of the weights
    if read_easydel_index(directory, OPTIMIZER_PREFIX):
        state = restore_easydel_moments(state, directory)
        say(f"continues {directory}, which EasyDeL saved, from step {int(state.step)}")
        return state
    step = read_easydel_step(directory, default=0)
    say(f"continues {directory}, which EasyDeL saved without an optimizer, from step {step}")
    return state.at_step(step)


def _has_runs(folder: Path) -> bool:
    return any(folder.glob("run-*")) and find_newest_run(folder) != folder


def _replace_weights(state: EasyDeLState, directory: Path) -> EasyDeLState:
    """Return a state with the weights of a folder."""
    values = _read_values(state.model, list_easydel_arrays(directory), directory)

    def replace(tree: nnx.State) -> nnx.State:
        wanted = flat_abstract(tree)
        missing = [name for name in wanted if name not in values]
        if missing:
            raise CheckpointError(
                f"{directory} has no {missing[0]}, which this run has: adapters need a folder with "
                "adapters, and a whole model one without"
            )
        placed = {
            name: jax.device_put(values[name].astype(leaf.dtype), leaf.sharding)
            for name, leaf in wanted.items()
        }
        return from_flat(tree, placed)

    return state.replace(graphstate=replace(state.graphstate), graphother=replace(state.graphother))
