"""Turn a checkpoint into a model directory of Hugging Face, or such a directory into a saved state.

    python -m ed_trainers.convert runs/mine/checkpoints/100 model-100
    python -m ed_trainers.convert meta-llama/Llama-3.2-1B states
    python -m ed_trainers.convert runs/mine/model streaming_params --to easylm
    python -m ed_trainers.convert runs/mine/checkpoints/100 folder --to easydel
    python -m ed_trainers.convert runs/mine/model maxtext --to maxtext
    python -m ed_trainers.convert checkpoints/100/items model --config meta-llama/Llama-3.1-8B
    python -m ed_trainers.convert streaming_params model --config runs/mine/model
    python -m ed_trainers.convert runs/mine/model model.gguf --dtype q8_0
    python -m ed_trainers.convert model.gguf model

Checkpoints of a run, and what `save_state` and `CheckpointManager` wrote, become a directory that
`transformers` loads; anything else is loaded as a model and saved by `CheckpointManager`. A LLaMA
also becomes a streaming checkpoint of EasyLM's, and such a file a model directory. A model becomes
a folder that EasyDeL or MaxText loads, and such a folder, or one of tunix, a model directory. A
GGUF file of llama.cpp becomes a model directory, and a model or a checkpoint a GGUF file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ed_infra import registry
from ed_infra.errors import CheckpointError, ConfigError, EasyDeLError, unknown_name
from ed_infra.parameter_names import canonical
from ed_infra.sharding import placement as sharding
from ed_models.base.gguf_export import from_gguf, save_gguf, to_gguf
from ed_models.base.module import EasyDeLBaseModule
from ed_models.checkpoints import hub
from ed_models.checkpoints.carried import CarriedTensors
from ed_models.checkpoints.checks import detect_task
from ed_models.checkpoints.easydel_folder import find_newest_run, is_easydel_folder
from ed_models.checkpoints.gguf.directory import ENDING as GGUF
from ed_models.checkpoints.maxtext_folder import write_maxtext_settings
from ed_models.checkpoints.orbax_arrays import find_orbax_item
from ed_models.checkpoints.saving import StoredTokenizer
from ed_models.checkpoints.tensor_files import EASYDEL_INDEX
from flax import nnx

from ed_trainers.checkpoints.manager import CheckpointManager
from ed_trainers.easylm import from_easylm, to_easylm
from ed_trainers.state import EasyDeLState
from ed_trainers.stored import checksums
from ed_trainers.stored.arrays import (
    flat_abstract,
    from_flat,
    read_arrays,
    save_step,
    stored_arrays,
)
from ed_trainers.stored.saved import check_format, saved_facts

#: Layouts of other programs that are written.
LAYOUTS = ("easydel", "easylm", "maxtext")
# Where a state has its variables; a module that was saved alone has them at the top.
_PLACES = ("graphstate/", "graphother/", "")


def get_model(directory: str | Path) -> EasyDeLBaseModule:
    """Read the model in a checkpoint, in the dtype that it was trained in.

    Args:
        directory: of a checkpoint of a run, or of a saved state.

    Raises:
        CheckpointError: there is none, it is damaged, or it holds only a part of a model.
    """
    path = Path(directory).absolute()
    facts = _facts(path)
    wrong = checksums.damage(path)
    if wrong is not None:
        raise CheckpointError(f"{path} is damaged: {wrong}; use another file")
    there = {
        one: stored.dtype
        for name, stored in stored_arrays(path / "arrays").items()
        for one in canonical(name.split("/"))
    }
    graphdef, state = _empty(facts, path)
    abstract_arrays: dict[str, jax.ShapeDtypeStruct] = {}
    places: dict[str, str] = {}
    for name, leaf in flat_abstract(state).items():
        for place in _PLACES:
            first = canonical((place + name).split("/"))[0]
            if first in there:
                places[name] = place + name
                abstract_arrays[place + name] = leaf.update(dtype=there[first])
                break
        else:
            raise CheckpointError(
                f"{path} has no {name}: it contains only the trained arrays, because the frozen "
                "weights are not saved. Finish the training run: its end writes the whole model"
            )
    arrays = read_arrays(path / "arrays", abstract_arrays)
    filled = from_flat(state, {name: arrays[place] for name, place in places.items()})
    with nnx.use_eager_sharding(False):
        model = nnx.merge(graphdef, filled)
    if "carried_tensors" in facts:
        model.carried_tensors = CarriedTensors.from_reference(facts["carried_tensors"])
    return model


def load_state(directory: str | Path, tx: optax.GradientTransformation | None) -> EasyDeLState:
    """Read a saved state; the shapes and the placement are those of its model.

    Args:
        directory: of a saved state, or of a state or a run that EasyDeL saved.
        tx: optimizer, whose saved state is read. None: the state has no optimizer.

    Raises:
        CheckpointError: there is no saved state, the state is damaged, or it has no state of `tx`.
    """
    path = Path(directory).absolute()
    if any(path.glob(EASYDEL_INDEX)) or any(path.glob(f"run-*/{EASYDEL_INDEX}")):
        from ed_trainers.checkpoints.easydel_state import load_easydel_state

        return load_easydel_state(path, tx)
    facts = saved_facts(path)
    model: Any = get_model(path)
    names = [name.split("/") for name in stored_arrays(path / "arrays")]
    learned = {one for parts in names if parts[0] == "graphstate" for one in canonical(parts[1:])}
    rules = [(f"^{re.escape(name)}$", True) for name in sorted(learned)]
    state = EasyDeLState.create(model=model)
    trainable_names = {
        one for name in flat_abstract(state.graphstate) for one in canonical(name.split("/"))
    }
    if trainable_names != learned:
        state = EasyDeLState.create(model=model, trainable=rules)
    if tx is None:
        return state.replace(step=jnp.asarray(facts["step"], jnp.int32))
    if not facts["optimizer"]:
        raise CheckpointError(f"{path} holds no optimizer state: omit tx, and call init_tx(tx)")
    return state.init_tx(tx).load_state(path)


def _facts(path: Path) -> dict[str, Any]:
    for name in ("state.json", "run/metadata"):
        if (path / name).is_file():
            facts = json.loads((path / name).read_text())
            check_format(facts, str(path))
            if facts.get("model") is None:
                raise CheckpointError(f"{path} holds arrays, but not the configuration of a model")
            return facts["model"]
    raise CheckpointError(f"{path} is neither a checkpoint nor a saved state")


def _empty(facts: dict[str, Any], path: Path) -> tuple[nnx.GraphDef, nnx.State]:
    """Structure, shapes and placement of a checkpoint's model, on the devices that are here."""
    model_type = facts["config"]["model_type"]
    modules = [registry.get_module(task, model_type) for task in registry.list_tasks(model_type)]
    module = next((one for one in modules if one.__name__ == facts["class"]), None)
    if module is None:
        raise CheckpointError(f"{path} holds a {facts['class']}, which is not installed here")
    config = registry.get_config(model_type).from_dict(facts["config"])
    config = config.replace(sharding_axis_dims=(1, -1, 1, 1, 1))
    if "carried_tensors" in facts:
        config.name_or_path = facts["carried_tensors"]["directory"]
    with nnx.use_eager_sharding(False):
        empty = nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(empty)
    placement = jax.tree.leaves(sharding.shardings(state, config))
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
        for leaf, place in zip(jax.tree.leaves(state), placement, strict=True)
    ]
    return graphdef, jax.tree.unflatten(jax.tree.structure(state), leaves)


def convert(
    source: str | Path,
    target: str | Path,
    *,
    config: str | Path | None = None,
    easylm: bool = False,
    to: str | None = None,
    dtype: str | None = None,
    scan_layers: bool = True,
) -> Path:
    """Convert in the direction that the source calls for; see the head of this module.

    Args:
        source: a checkpoint, a saved state, a directory of Hugging Face or the name of one on the
            hub; a GGUF file; or another file, a stream of EasyLM's.
        target: what to write. A name that ends with `.gguf` is a GGUF file.
        config: of a stream, or of a folder of MaxText or tunix: a directory with the model's
            `config.json`, or its name on the hub.
        easylm: the same as `to="easylm"`.
        to: another layout to write: `easydel` or `maxtext` (a folder), or `easylm` (a stream);
            None = the layout that the source calls for.
        dtype: format of the matrices of a GGUF file ("f16", "q8_0", …), or dtype of the model that
            is read from one; None = that of the source.
        scan_layers: of a folder of MaxText: stack the layers, as its option of this name does.

    Returns:
        The directory, or the file, that was written.

    Raises:
        CheckpointError: the source is damaged, or holds only a part of a model.
        ConfigError: a stream comes without a configuration, or another source with one.
    """
    to = "easylm" if easylm and to is None else to
    if to not in (None, *LAYOUTS):
        raise unknown_name("layout", to, LAYOUTS)
    item = _find_foreign_item(Path(source))
    if item is not None:
        folder = None if config is None else hub.resolve(str(config), weights=False)
        source, config = write_maxtext_settings(item, folder), None
    if to is not None and (
        config is not None or GGUF in (Path(source).suffix, Path(target).suffix)
    ):
        raise ConfigError(
            f"to={to!r} (--to) needs a model or a checkpoint as the source, and a directory or a "
            "stream as the target: convert a GGUF file or a stream to a model directory first"
        )
    if str(target).endswith(GGUF):
        return _to_gguf(source, Path(target), dtype)
    if str(source).endswith(GGUF):
        return from_gguf(source, target, dtype=dtype)
    if dtype is not None:
        raise ConfigError(f"dtype={dtype!r} (--dtype) has an effect only on GGUF files: omit dtype")
    if not scan_layers and to != "maxtext":
        raise ConfigError(
            "scan_layers=False (--no-scan-layers) has an effect only with to='maxtext' "
            "(--to maxtext): omit it"
        )
    if Path(source).is_file() != (config is not None):
        raise ConfigError(
            f"{source}: config (--config) is a directory with the config.json of a stream's model, "
            "or of the model in a folder of MaxText or tunix; only a stream requires one"
        )
    if config is not None:
        return from_easylm(source, target, config)
    if to == "easydel":
        return _to_easydel(source, Path(target))
    if to == "maxtext":
        return _to_maxtext(source, Path(target), scan_layers=scan_layers)
    if to == "easylm":
        if not (Path(source) / "arrays").is_dir():
            return to_easylm(source, target)
        with tempfile.TemporaryDirectory(prefix="easylm-") as directory:
            get_model(source).save_pretrained(directory)
            return to_easylm(directory, target)
    if (Path(source) / "arrays").is_dir():
        get_model(source).save_pretrained(target)
        return Path(target)
    if item is not None or is_easydel_folder(find_newest_run(Path(source))):
        _load_model(source).save_pretrained(target)
        return Path(target)
    return CheckpointManager(target).save(_load_model(source))


def _load_model(source: str | Path) -> EasyDeLBaseModule:
    """Load a model in the dtype of its files, for the task of its configuration."""
    directory = hub.resolve(source)
    stored = getattr(hub.read_config(directory), "dtype", None) or "float32"
    dtype = jnp.dtype(str(stored).removeprefix("torch."))
    return hub.from_pretrained(directory, task=detect_task(directory), param_dtype=dtype)


def _to_easydel(source: str | Path, target: Path) -> Path:
    """Write a model, or the model of a checkpoint, as a folder that EasyDeL loads."""
    from ed_models.checkpoints.easydel_writer import save_easydel_folder

    model, tokenizer = _load_with_tokenizer(source)
    return save_easydel_folder(model, target, tokenizer=tokenizer)


def _load_with_tokenizer(source: str | Path) -> tuple[EasyDeLBaseModule, StoredTokenizer | None]:
    """Load a model, or the model of a checkpoint, and find its tokenizer."""
    is_checkpoint = (Path(source) / "arrays").is_dir()
    model = get_model(source) if is_checkpoint else _load_model(source)
    directory = find_tokenizer(source) if is_checkpoint else hub.resolve(source)
    return model, None if directory is None else StoredTokenizer(directory)


def _find_foreign_item(source: Path) -> Path | None:
    """Return the parameters in a folder of MaxText or tunix; None for other sources."""
    is_own = (source / "arrays").is_dir() or any(source.glob("*.safetensors"))
    return None if is_own or not source.is_dir() else find_orbax_item(source)


def _to_maxtext(source: str | Path, target: Path, *, scan_layers: bool) -> Path:
    """Write a model, or the model of a checkpoint, as step 0 of a run of MaxText, with the
    configuration and the tokenizer beside it."""
    from ed_models.checkpoints.maxtext_writer import build_maxtext_arrays

    if target.exists() and (target.is_file() or any(target.iterdir())):
        raise CheckpointError(f"{target} is not empty: choose a new directory")
    model, tokenizer = _load_with_tokenizer(source)
    tree: dict[str, Any] = {}
    for name, values in build_maxtext_arrays(model, scan_layers=scan_layers).items():
        *path, last = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = values
    save_step(target, {"step": 0, "params": {"params": tree}, "opt_state": {}}, "items")
    model.config.save_pretrained(target)
    model.write_settings(target)
    if tokenizer is not None:
        tokenizer.save_pretrained(target)
    return target


def _to_gguf(source: str | Path, target: Path, dtype: str | None) -> Path:
    """Write a model, or the model of a checkpoint, with the tokenizer next to it."""
    if not (Path(source) / "arrays").is_dir():
        return to_gguf(source, target, dtype=dtype)
    tokenizer = find_tokenizer(source)
    return save_gguf(get_model(source), target, tokenizer=tokenizer, dtype=dtype)


def find_tokenizer(checkpoint: str | Path) -> Path | None:
    """Return the directory with the tokenizer of a checkpoint; None: the run has saved none."""
    run = Path(checkpoint).absolute().parent.parent  # runs/mine/checkpoints/100
    places = (Path(checkpoint), run / "model", run / "tokenizer", run)
    return next((place for place in places if (place / "tokenizer.json").is_file()), None)


def _main() -> int:
    """Convert, and print the written files."""
    parser = argparse.ArgumentParser(
        prog="python -m ed_trainers.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", help="checkpoint, saved state, directory or stream")
    parser.add_argument("target", help="directory or stream to write")
    parser.add_argument("--config", help="of a stream or a folder of MaxText: the model's folder")
    parser.add_argument("--easylm", action="store_true", help="the same as --to easylm")
    parser.add_argument("--to", choices=LAYOUTS, help="layout to write")
    parser.add_argument(
        "--no-scan-layers", dest="scan_layers", action="store_false", help="of a folder of MaxText"
    )
    parser.add_argument("--dtype", help="of a GGUF file: f32, f16, bf16, q8_0 or q4_0")
    options = parser.parse_args()
    try:
        print(convert(**vars(options)))
    except EasyDeLError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
