"""`eLargeModel`: one object from configuration to trained, evaluated and served model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Self, TypeVar

from ed_infra.fields import FIELDS, canonical_field
from ed_infra.options import Options
from ed_trainers.arguments import TrainingArguments

from ed_elarge import actions, nodes
from ed_elarge.build import Parts
from ed_elarge.describe import describe
from ed_elarge.errors import Document, InputError
from ed_elarge.normalize import check_section, normalize
from ed_elarge.run_config import RunConfig
from ed_elarge.sections import EvalOptions, GenerateOptions, ServeOptions
from ed_elarge.table import look
from ed_elarge.validation import validate

if TYPE_CHECKING:
    from ed_data.loader import Loader
    from ed_esurge.engine import eSurge
    from ed_models.module import EasyDeLBaseModule
    from ed_trainers.trainer import Trainer, TrainerOutput
    from transformers import PreTrainedTokenizerBase

O = TypeVar("O", bound=Options)  # noqa: E741 - options


def _setter(section: str) -> Callable[Concatenate[eLargeModel, ...], eLargeModel]:
    def set_section(self: eLargeModel, **keys: Any) -> eLargeModel:
        return self.update_config({section: keys})

    set_section.__doc__ = f"Set keys of `{section}`."
    set_section.__name__ = f"set_{section}"
    return set_section


class eLargeModel:
    """Builds, trains, evaluates and serves what a configuration describes.

    Setters return the object, so that they can be chained; each checks the keys and their values at
    once. What one section demands of another is checked when something is built, or by `validate`.
    Whatever is built is kept until the configuration changes or `clear_cache`.

    Args:
        config: the sections as a mapping (see `docs/yaml.md`), or the path of a YAML or JSON file.

    Raises:
        InputError: an unknown key, a value of the wrong type, ….
    """

    def __init__(self, config: Mapping[str, Any] | str | Path | None = None) -> None:
        self._checked: Parts | None = None
        if isinstance(config, (str, Path)):
            self._document = nodes.read(config)
            self._parts  # noqa: B018 - checked now
            return
        self._document = Document("configuration", value={})
        if config:
            self.update_config(config)

    # Where a configuration comes from and goes to.

    @classmethod
    def from_pretrained(cls, name_or_path: str, *, task: str | None = None, **model: Any) -> Self:
        """Begin with an existing model: a directory in Hugging Face layout, or a hub id."""
        section = {"name_or_path": name_or_path, **model}
        return cls({"model": section if task is None else {**section, "task": task}})

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read a run file."""
        return cls(path)

    @classmethod
    def from_json(cls, path: str | Path) -> Self:
        """Read a configuration that was saved as JSON."""
        return cls(path)

    @property
    def config(self) -> RunConfig:
        """The whole configuration, checked: sections with defaults and derived values.

        Raises:
            InputError: all that is wrong with it.
        """
        return self._parts.run

    @property
    def _parts(self) -> Parts:
        """What is built of the present configuration."""
        if self._checked is None:
            run = normalize(self._document)
            for text in run.warning_texts():
                warnings.warn(text, stacklevel=3)
            self._checked = Parts(run)
        return self._checked

    def to_dict(self) -> dict[str, Any]:
        """The canonical configuration, defaults included, as JSON values."""
        return self.config.to_dict()

    def to_yaml(self, path: str | Path) -> None:
        """Save the configuration as YAML."""
        actions.write(path, self.config.to_yaml())

    def to_json(self, path: str | Path) -> None:
        """Save the configuration as JSON."""
        actions.write(path, self.config.to_json())

    def validate(self) -> Self:
        """Check everything that can be checked without loading anything.

        Raises:
            InputError: all that is wrong.
        """
        if self.config.model is None:
            raise self.config.missing("model")
        look(self.config)
        return self

    def __repr__(self) -> str:
        return f"eLargeModel({', '.join(self._document.value or {})})"

    def __str__(self) -> str:
        return describe(self.config)

    # Setters.

    def update_config(self, config: Mapping[str, Any]) -> Self:
        """Merge sections into the configuration; lists and plain values replace what was there."""
        value = _merged(self._document.value or {}, config)
        problems = [p for k, v in value.items() if k != "actions" for p in check_section(k, v)]
        if problems:
            raise InputError("configuration", problems)
        self.clear_cache()
        self._document, self._checked = Document("configuration", value=value), None
        return self

    set_loader = _setter("loader")
    set_sharding = _setter("sharding")
    set_platform = _setter("platform")
    set_mixture = _setter("mixture")
    set_esurge = _setter("esurge")
    set_eval = _setter("eval")

    def set_model(self, name_or_path: str | None = None, **model: Any) -> Self:
        """Set keys of `model`."""
        if name_or_path is not None:
            model["name_or_path"] = name_or_path
        return self.update_config({"model": model})

    def set_dtype(self, dtype: str, param_dtype: str | None = None) -> Self:
        """Set the dtype of computation, and of stored parameters (the same by default)."""
        return self.update_config({"loader": {"dtype": dtype, "param_dtype": param_dtype or dtype}})

    def set_base_config(self, **values: Any) -> Self:
        """Override values of the model's configuration."""
        return self.update_config({"base_config": {"values": values}})

    def set_operation_configs(
        self, configs: Mapping[str, Mapping[str, Any]] | None = None, **values: Any
    ) -> Self:
        """Set kernel settings by operation; execution fields such as `attn_mechanism` go along.

        Args:
            configs: operation -> settings, such as `{"flash_attn2": {"block_q": 128}}`.
            values: operations with their settings, or execution fields with their values.
        """
        operations, fields = {**(configs or {})}, {}
        for name, value in values.items():
            (fields if canonical_field(name) in FIELDS else operations)[name] = value
        return self.update_config(
            {"base_config": {"values": fields, "operation_configs": operations}}
        )

    def add_dataset(
        self,
        data_files: str | Sequence[str] | Mapping[str, Any] | None = None,
        dataset_type: str | None = None,
        content_field: str | None = None,
        split: str | None = None,
        *,
        dataset_name: str | None = None,
        max_length: int | None = None,
        held_out: bool = False,
        **inform: Any,
    ) -> Self:
        """Add a source of texts to the mixture.

        Args:
            data_files: files, globs, or what `dataset_type` reads.
            dataset_type: `json`, `parquet`, `csv`, `txt`, `huggingface`, `python`, …
            content_field: the field that holds the text.
            split: which split of it.
            dataset_name: id of a Hugging Face dataset, instead of `data_files`.
            max_length: tokens at which each text of the mixture is cut.
            held_out: read for evaluation only.
            inform: further keys of an inform.
        """
        if dataset_name is not None:
            data_files, dataset_type = dataset_name, "huggingface"
        keys = {
            "type": dataset_type,
            "data_files": data_files,
            "content_field": content_field,
            "dataset_split_name" if dataset_name is not None else "split": split,
            **inform,
        }
        new = {key: value for key, value in keys.items() if value is not None}
        name = "eval_informs" if held_out else "informs"
        before = ((self._document.value or {}).get("mixture") or {}).get(name) or ()
        mixture: dict[str, Any] = {name: [*before, new]}
        if max_length is not None:
            mixture["tokenization"] = {"max_length": max_length}
        return self.update_config({"mixture": mixture})

    def set_trainer(self, trainer_type: str | None = None, **trainer: Any) -> Self:
        """Set the method and keys of `trainer`."""
        if trainer_type is not None:
            trainer["trainer_type"] = trainer_type
        return self.update_config({"trainer": trainer})

    # Building; each part is built once.

    def build_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded or trained."""
        return self._parts.tokenizer

    def build_model(self) -> EasyDeLBaseModule:
        """The model on its devices."""
        return self._parts.model

    def build_dataset(self) -> Loader:
        """The loader of training batches."""
        return self._parts.loaders[0]

    def build_eval_dataset(self) -> Loader | None:
        """The loader of held-out batches, or None where nothing is held out."""
        return self._parts.loaders[1]

    def build_training_arguments(self) -> TrainingArguments:
        """The arguments of the trainer, derived values included."""
        if self.config.trainer is None:
            raise self.config.missing("trainer")
        return self.config.trainer

    def build_trainer(self) -> Trainer:
        """The trainer with model, tokenizer and data."""
        return self._parts.trainer

    def build_esurge(self) -> eSurge:
        """The serving engine around the model."""
        return self._parts.engine

    def held_out_texts(self) -> list[str]:
        """The texts that training does not see."""
        return self._parts.held_out_texts if self.config.has_held_out else []

    def clear_cache(self) -> Self:
        """Let go of everything that was built; the configuration stays."""
        if self._checked is not None:
            self._checked.close()
        return self

    # Doing.

    def train(self) -> TrainerOutput:
        """Train; goes on from the newest checkpoint of the run, if there is one."""
        return actions.run_training(self._parts)

    def eval(
        self,
        tasks: Sequence[str] | str | None = None,
        *,
        engine: str = "auto",
        **options: Any,
    ) -> dict[str, Any]:
        """Evaluate with lm-evaluation-harness over eSurge.

        Args:
            tasks: task names; default: those of the `eval` section.
            engine: `esurge`, or `auto`, which takes it.
            options: keys of the `eval` section, for this time.

        Returns:
            lm-eval's results.

        Raises:
            InputError: an option is unknown or wrong.
            ConfigError: a task does not exist, or its data cannot be had.
        """
        if tasks is not None:
            options["tasks"] = [tasks] if isinstance(tasks, str) else list(tasks)
        keys = _options(EvalOptions, {"engine": engine, **options})
        return actions.run_evaluation(self._parts, keys)[0]

    def generate(
        self, prompts: Sequence[str] | str | None = None, **options: Any
    ) -> list[tuple[str, str]]:
        """Complete prompts with the engine: `[(prompt, completion), ...]`.

        Args:
            prompts: texts; default: the beginning of a held-out text.
            options: keys of the `generate` action.
        """
        keys = options if prompts is None else {**options, "prompts": prompts}
        return actions.complete(self._parts, _options(GenerateOptions, keys))

    def serve(self, **options: Any) -> None:
        """Serve the OpenAI-compatible API until interrupted; options: of the `serve` action."""
        actions.run_server(self._parts, _options(ServeOptions, options))


def _options(cls: type[O], keys: Mapping[str, Any]) -> O:
    value, problems = validate(cls, keys, ())
    if value is None:
        raise InputError("options", problems)
    return value


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`new` over `old`, mapping by mapping."""
    out = dict(old)
    for key, value in new.items():
        before = out.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        out[key] = _merged(before, value) if both else value
    return out
