"""The shapes of a run's model: a child process with jax reads them from the model class."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError, describe_missing_path
from ed_infra.specs import KEPT_CODES

from ed_elarge.config.checkpoint_tasks import find_model_gguf
from ed_elarge.config.local_paths import expand_path
from ed_elarge.config.run_config import RunConfig
from ed_elarge.plan import child
from ed_elarge.plan.tensors import CacheShape, CodeStorage, ModelShapes, PlanTensor, StateShape

#: The modules that write an answer. With another of them, an answer of an earlier plan is not read.
_PROGRAMS = ("answers.py", "abstract.py")


def get_shapes(run: RunConfig, *, time_limit: float = 120.0) -> ModelShapes:
    """Return the shapes of the model of a run.

    Args:
        run: the run; its task is a causal language model.
        time_limit: seconds for the child process.

    Raises:
        ConfigError: the configuration of the model is not on this machine, or the model is no
            causal language model.
    """
    if run.task != TaskType.CAUSAL_LM:
        raise ConfigError(
            f"elarge plan knows causal language models, and the task of this run is "
            f"{run.task.value!r}"
        )
    config = read_config_values(run)
    child_response = _load_shapes(run, config, time_limit)
    return ModelShapes(
        str(config["model_type"]),
        child_response["config"],
        tuple(_tensor(one) for one in child_response["tensors"]),
        tuple(CacheShape(*one) for one in child_response["caches"]),
        tuple(StateShape(*one) for one in child_response["states"]),
    )


def read_config_values(run: RunConfig) -> dict[str, Any]:
    """Return the values that determine the architecture of the run's model.

    Raises:
        ConfigError: `config.json` or the size of the vocabulary is not on this machine.
    """
    if run.model is None:
        raise run.missing("model")
    known_config = run.known_model
    if known_config is None:
        name = str(run.model.name_or_path)
        raise ConfigError(
            f"model.name_or_path {name!r} has no config.json on this machine: download the model, "
            f"or name its directory{describe_missing_path(name)}"
        )
    values = {**known_config, **(run.base_config.values if run.base_config else {})}
    if values.get("vocab_size") is None and run.model.config is not None:
        values["vocab_size"] = vocabulary(run)
    return values


def vocabulary(run: RunConfig) -> int:
    """Return the number of tokens of the run's tokenizer.

    Raises:
        ConfigError: the tokenizer is not on this machine.
    """
    assert run.model is not None, "`read_config_values` checked this"
    section = run.model.tokenizer_section
    if section.train is not None:
        return section.train.vocab_size
    file = Path(str(section.name_or_path)).expanduser() / "tokenizer.json"
    try:
        content = json.loads(file.read_text("utf-8"))
        vocab = content["model"]["vocab"]
        ids = [*vocab.values()] if isinstance(vocab, Mapping) else [*range(len(vocab))]
        ids += [token["id"] for token in content.get("added_tokens") or ()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the number of tokens is unknown, because {file} cannot be read ({error}): set "
            "model.config.vocab_size"
        ) from None
    return len(set(ids))


def _load_shapes(run: RunConfig, config: Mapping[str, Any], time_limit: float) -> dict[str, Any]:
    """Return the answer of a child process, or the same answer from the cache of earlier plans."""
    programs = b"".join(Path(__file__).with_name(name).read_bytes() for name in _PROGRAMS)
    layout = hashlib.sha256(programs).hexdigest()
    facts = [version("ed-models"), layout, config, _identify_codes(run)]
    text = json.dumps(facts, sort_keys=True, default=str)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    file = home / "easydel" / "shapes" / f"{config['model_type']}-{name}.json"
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        pass
    names = run.sharding.axis_names
    child_response = child.ask_child(
        run,
        "shapes",
        devices=1,
        time_limit=time_limit,
        sections={"sharding": {"axis_dims": [1] * len(names), "axis_names": list(names)}},
        vocab=config.get("vocab_size"),
    )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(child_response), "utf-8")
    except OSError:
        pass  # the next plan tries again
    return child_response


def _identify_codes(run: RunConfig) -> list[object] | None:
    """Return what changes if the file changes whose codes a run keeps; None = none are kept.

    Raises:
        ConfigError: the model is no GGUF file.
    """
    section = run.weight_format
    if section is None or section.quantization_method not in KEPT_CODES:
        return None
    name = None if run.model is None else run.model.name_or_path
    method = section.quantization_method
    file = None if name is None else find_model_gguf(expand_path(name))
    if file is None:
        raise ConfigError(
            f"quantization_method: {method} keeps the codes of a GGUF file, and the model "
            f"{name or 'of model.config'} is none: name a file that ends with .gguf, or select "
            "another format"
        )
    status = file.stat()
    return [method, section.pattern, str(file), status.st_size, status.st_mtime_ns]


def _tensor(one: Mapping[str, Any]) -> PlanTensor:
    shape = tuple(one["shape"])
    axes = tuple(one["axes"]) if one["axes"] is not None else (None,) * len(shape)
    codes = None if one["codes"] is None else CodeStorage(*one["codes"])
    return PlanTensor(one["name"], shape, axes, one["layers"], one["dtype"], codes=codes)
