"""The engines of the action `serve`: one model or several, in this process or in replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ed_esurge.command.load import check_model_names, get_model_name
from ed_esurge.command.model_directory import build_loading, estimate_memory

from ed_elarge.building.replicas import replicated_engine
from ed_elarge.config.action_options import ServeOptions
from ed_elarge.config.normalize import normalize
from ed_elarge.errors import Document
from ed_elarge.model import eLargeModel

if TYPE_CHECKING:
    from ed_esurge.frontends.library.checkpoint_files import CheckpointFiles
    from ed_esurge.server.options import ModelSource

#: Sections of a run file that also describe the further models of its server.
SHARED_SECTIONS = ("quantization", "loader", "sharding", "platform", "base_config")


@contextmanager
def running_engines(elm: eLargeModel, options: ServeOptions, name: str) -> Iterator[Any]:
    """Build the engine of a server for the block, or several engines by name.

    Args:
        name: Name of the model of the run.

    Raises:
        ConfigError: Two models have the same name.
        EasyDeLError: A model cannot be loaded.
    """
    models = list_served_models(elm, options, name)
    with ExitStack() as stack:
        engines = {
            model_name: stack.enter_context(replicated_engine(model, model_name, options))
            if options.replicated
            else model.part("engine")
            for model_name, model in models.items()
        }
        yield engines if options.also else engines[name]


def list_served_models(
    elm: eLargeModel, options: ServeOptions, name: str
) -> dict[str, eLargeModel]:
    """Return the models of the start by name, with their shares of the memory.

    Raises:
        ConfigError: Two models have the same name.
    """
    names = [name, *map(get_model_name, options.also)]
    check_model_names(names)
    engine = elm.config.esurge
    changes: dict[str, object] = {}
    if options.lora_modules and "max_loras" not in engine.model_fields_set:
        changes["max_loras"] = len(options.lora_modules)
    if options.also:
        changes |= engine.share_memory(1, len(names))
    models = {name: elm.with_engine_options(changes) if changes else elm}
    for place, model in enumerate(options.also, 2):
        shares = engine.share_memory(place, len(names))
        models[names[place - 1]] = describe_model(elm, model, shares)
    if options.also:
        for one in models.values():
            one.shares_options = True
    return models


def describe_model(elm: eLargeModel, model: str, changes: Mapping[str, object]) -> eLargeModel:
    """Return another model with the options of a run.

    Args:
        model: A directory, or a hub id.
        changes: Other options of the engine.
    """
    run = elm.config
    sections = {key: run.written[key] for key in SHARED_SECTIONS if run.written.get(key)}
    extras = {"extra_kwargs": {"trust_remote_code": True}} if run.loader.trust_remote_code else {}
    sections["model"] = {"name_or_path": model, **extras}
    engine = run.esurge.replace(**changes)
    sections["esurge"] = engine.model_dump(mode="json", exclude_unset=True)
    other = eLargeModel.from_run(normalize(Document(run.document.name, value=sections)))
    other.shares_options = True
    return other


def build_directory(elm: eLargeModel, options: ServeOptions) -> ModelSource | None:
    """Return how the models of `model_directory` are loaded; None without the option.

    Raises:
        ConfigError: The directory does not exist.
    """

    def load(path: Path) -> Any:
        return describe_model(elm, str(path), {}).part("engine")

    def estimate(files: CheckpointFiles) -> int:
        run = elm.config
        width = 4 if run.loader.param_dtype == "float32" else 2
        weights = run.weight_format
        return estimate_memory(
            run.esurge, files, width, None if weights is None else str(weights.quantization_method)
        )

    return build_loading(options, elm.config.esurge, load, estimate)
