"""`RunConfig`: a validated configuration with the location of each value in its file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pydantic
import yaml
from ed_data import schema as schemas
from ed_data.config import Mixture
from ed_data.errors import DataError
from ed_esurge.config import EngineConfig
from ed_infra.config.fields import FIELDS, canonical_field, normalize_fields
from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError, ConfigError, MeshError
from ed_infra.options import Options
from ed_models.checkpoints.text_halves import text_settings
from ed_trainers.arguments import METHODS, MethodEntry, TrainingArguments
from ed_trainers.options.base import RowKind
from ed_trainers.options.online import EnvironmentName
from ed_trainers.options.supervised import ClassifierArguments

from ed_elarge.config import architectures
from ed_elarge.config.adaptation import LoraSection, QuantizationSection, WeightFormat
from ed_elarge.config.checkpoint_tasks import find_task, read_task_config
from ed_elarge.config.local_paths import is_file
from ed_elarge.config.sections import (
    WITHOUT_TEXT,
    AsynchronousSection,
    BaseConfigSection,
    EvalSection,
    LoaderSection,
    ModelSection,
    OtherModelSection,
    PlatformSection,
    SetsConfig,
    ShardingSection,
)
from ed_elarge.config.validation import typed_path, value_at
from ed_elarge.errors import Document, InputError, Problem, ValuePath

#: Kind of the rows of a method -> schema of the same method for an encoder-decoder.
_OF_ENCODER_DECODERS = {
    "text": schemas.SEQ2SEQ,
    "preference": schemas.SEQ2SEQ_PREFERENCE,
}


@dataclass(frozen=True)
class Action:
    """A validated action.

    Attributes:
        name: A key of `ed_elarge.config.table.ACTIONS`.
        options: Its parameters.
        path: Path of the action in the file.
        parameter_path: Path of its parameters.
    """

    name: str
    options: Any
    path: ValuePath
    parameter_path: ValuePath


class RunConfig:
    """A validated configuration with an attribute for each section of `table.SECTIONS`.

    Omitted sections have their defaults. The models, `quantization`, `lora`, `mixture` and
    `trainer` have no defaults and are None.

    Args:
        document: The source file, for the location of later errors; or a document with a value.
        prefix: Path of the mapping that contains the sections.
        written_sections: The sections as the user wrote them.
        sections: Name -> validated section.
        actions: The actions in order.

    Attributes:
        warnings: Warnings, such as keys without effect; `normalize` sets them.
    """

    model: ModelSection | None
    reference_model: OtherModelSection | None
    teacher_model: OtherModelSection | None
    reward_model: OtherModelSection | None
    quantization: QuantizationSection | None
    lora: LoraSection | None
    loader: LoaderSection
    sharding: ShardingSection
    platform: PlatformSection
    base_config: BaseConfigSection
    mixture: Mixture | None
    trainer: TrainingArguments | None
    esurge: EngineConfig
    training_engine: EngineConfig | None
    asynchronous: AsynchronousSection | None
    eval: EvalSection
    warnings: Sequence[Problem] = ()
    note: str = ""
    _stored_config: Mapping[str, Any] | None = None

    def __init__(
        self,
        document: Document,
        prefix: ValuePath,
        written_sections: Mapping[str, Any],
        sections: Mapping[str, Options | Mixture | None],
        actions: Sequence[Action] = (),
    ) -> None:
        self.document = document
        self.prefix = prefix
        self.written = written_sections
        self.sections: dict[str, Options | Mixture | None] = {}
        self.actions = tuple(actions)
        self.set_sections(sections)

    def set_sections(self, sections: Mapping[str, Options | Mixture | None]) -> None:
        """Set validated sections, also as attributes."""
        self.sections |= sections
        vars(self).update(sections)

    # Values that depend on several sections.

    @property
    def directory(self) -> Path:
        """Output directory of the run: the trainer's directory, or the working directory."""
        return Path(self.trainer.save_directory) if self.trainer is not None else Path()

    def engine_of_training(self) -> EngineConfig:
        """Return the options of the engine of a training run: `training_engine` over `esurge`.

        Raises:
            pydantic.ValidationError: The options exclude each other.
        """
        changes = self.training_engine
        if changes is None:
            return self.esurge
        return self.esurge.replace(**{k: getattr(changes, k) for k in changes.model_fields_set})

    @property
    def resumes(self) -> bool:
        """Whether training continues the checkpoints of an earlier run in the directory."""
        return self.trainer is not None and self.trainer.resume_if_possible

    @property
    def folder(self) -> Path:
        """Folder of the run file, or the working directory for a configuration from Python."""
        file = Path(self.document.name)
        return file.absolute().parent if is_file(file) else Path.cwd()

    @property
    def method(self) -> str:
        """Method of the trainer, such as `sft`; empty without a trainer."""
        kind = type(self.trainer)
        return next((name for name, entry in METHODS.items() if entry.arguments is kind), "")

    @property
    def method_entry(self) -> MethodEntry:
        """Entry of the method; without a trainer, the entry of `sft`."""
        return METHODS[self.method or "sft"]

    @property
    def tasks(self) -> tuple[TaskType, ...]:
        """Tasks of the models that the method trains; the first is the default."""
        return (self.method_entry.task, *self.method_entry.other_tasks)

    @property
    def task(self) -> TaskType:
        """Task of the model: `model.task`, or the default of the method.

        `auto-bind` represents the task that the checkpoint names. It remains if the checkpoint
        names a task of another method, or is not on this machine.
        """
        model_task = self.model.task if self.model is not None else None
        if model_task == TaskType.AUTO_BIND:
            assert self.model is not None, "its task is known"
            config, name = self.stored_config, self.model.name_or_path
            if config is not None and name is not None:
                model_task = find_task(name, config) or model_task
            if self.trainer is not None and model_task not in self.tasks:
                model_task = TaskType.AUTO_BIND
        if self.trainer is None:
            return model_task or TaskType.CAUSAL_LM
        first, *other_tasks = self.tasks
        automatic = model_task == TaskType.AUTO_BIND and other_tasks
        return model_task if model_task and (model_task in self.tasks or automatic) else first

    @property
    def stored_config(self) -> Mapping[str, Any] | None:
        """Content of the checkpoint's config.json, read once; None if it is not on this machine."""
        model = self.model
        if self._stored_config is None and model is not None and model.name_or_path is not None:
            self._stored_config = read_task_config(model.name_or_path, model.extra_kwargs.revision)
        return self._stored_config

    @property
    def schema(self) -> schemas.Schema:
        """Schema of the mixture's rows for the method of the trainer."""
        entry, trainer = self.method_entry, self.trainer
        rows = (trainer.rows if trainer is not None else None) or RowKind(entry.rows)
        if self.task == TaskType.SEQUENCE_TO_SEQUENCE != entry.task:
            return _OF_ENCODER_DECODERS[rows.name]
        if self.task == TaskType.SPEECH_SEQUENCE_TO_SEQUENCE and rows.name == "text":
            return schemas.SPEECH_SEQ2SEQ
        if rows.settings:
            return getattr(schemas, f"{rows.name}_schema")(**rows.settings)
        schema = getattr(schemas, rows.name.upper())
        if isinstance(trainer, ClassifierArguments):
            return schema.with_classes(trainer.label_names)
        return schema

    @property
    def has_images(self) -> bool:
        """Whether the model reads images, so that its processor prepares the data."""
        return self.task in (
            TaskType.IMAGE_TEXT_TO_TEXT,
            TaskType.IMAGE_CLASSIFICATION,
            TaskType.ZERO_SHOT_IMAGE_CLASSIFICATION,
        )

    @property
    def has_text(self) -> bool:
        """Whether the model reads text, so that it has a tokenizer."""
        return self.task not in WITHOUT_TEXT

    @property
    def has_audio(self) -> bool:
        """Whether the model writes transcripts of recordings, which its processor prepares."""
        return self.task in (TaskType.SPEECH_SEQUENCE_TO_SEQUENCE, TaskType.CTC)

    @property
    def has_recordings(self) -> bool:
        """Whether the prompts of the model contain recordings, which its processor prepares."""
        return self.task == TaskType.ANY_TO_ANY

    @property
    def has_processor(self) -> bool:
        """Whether a processor contains the tokenizer of the model."""
        return self.has_images or self.has_audio or self.has_recordings

    @property
    def takes_prompts(self) -> bool:
        """Whether the method reads prompts, which are not packed."""
        return self.method_entry.rows == "prompt"

    @property
    def batch_size(self) -> int:
        """Sequences of a batch; `normalize` sets one value for trainer and mixture."""
        return (self.mixture.batch_size if self.mixture is not None else None) or 1

    @property
    def sequence_length(self) -> tuple[int | None, str]:
        """Tokens of one sequence, and the key that sets the number.

        `mixture.pack_seq_length` with packing, then `trainer.max_length`, then
        `mixture.tokenization.max_length`, then the default of the method, at most
        `max_position_embeddings`. The key of a default is empty.
        """
        mixture, trainer = self.mixture, self.trainer
        packed = mixture.pack_seq_length if mixture is not None and mixture.pack_tokens else None
        candidates = (
            (packed, "mixture.pack_seq_length"),
            (trainer.max_length if trainer is not None else None, "trainer.max_length"),
            (
                mixture.tokenization.max_length if mixture is not None else None,
                "mixture.tokenization.max_length",
            ),
        )
        default = None if trainer is None else trainer.default_length(self.known_positions)
        return next((c for c in candidates if c[0] is not None), (default, ""))

    @property
    def known_positions(self) -> int | None:
        """The model's `max_position_embeddings`, or None if unknown without a download."""
        values = self.base_config.values if self.base_config is not None else {}
        config = {**(self.known_model or {}), **values}
        if isinstance(config.get("text_config"), Mapping):
            config = config["text_config"]
        name = "max_position_embeddings"
        limit = config.get(name, architectures.get_default(config.get("model_type"), name))
        return limit if type(limit) is int and limit > 0 else None

    @property
    def has_held_out(self) -> bool:
        """Whether the mixture holds out texts for evaluation."""
        mixture = self.mixture
        return mixture is not None and bool(mixture.eval_fraction or mixture.eval_informs)

    @property
    def environment(self) -> EnvironmentName | None:
        """Name of the environment of a method that samples, or None."""
        of_trainer = getattr(self.trainer, "environment", None)
        return of_trainer or (self.asynchronous and self.asynchronous.environment)

    @property
    def weight_format(self) -> WeightFormat | None:
        """Quantization format of the model's weights, or None.

        `trainer.quantization_mode` is the same as `quantization.model` with `simulate`.
        """
        section = self.quantization
        if section is not None and section.apply_quantization and section.model is not None:
            return section.model
        spec = self.trainer.simulated_format if self.trainer is not None and self.trains else None
        if spec is None:
            return None
        return WeightFormat(
            quantization_method=spec.dtype, group_size=spec.group_size, simulate=True
        )

    @property
    def trains(self) -> bool:
        """Whether the run trains a model, or has no actions."""
        return self.trainer is not None and (self.will("train") or not self.actions)

    @property
    def has_frozen_weights(self) -> bool:
        """Whether the weights are quantized and therefore not trained."""
        return self.weight_format is not None and not self.weight_format.simulate

    @property
    def adapters(self) -> LoraSection | None:
        """Adapters of the model. Training a quantized model adds them if the section is omitted."""
        needed = self.trains and self.has_frozen_weights
        return LoraSection() if self.lora is None and needed else self.lora

    @property
    def known_model(self) -> Mapping[str, Any] | None:
        """Configuration of the model, or of its text half, if available without a download."""
        model = self.model
        if model is None or model.config is not None:
            return model.config if model is not None else None
        config = self.stored_config
        if config is None:
            return None
        # Without a trainer, the checkpoint names the task.
        task = self.task if self.trainer is not None else model.task
        try:
            return text_settings(config, task=task)
        except CheckpointError:
            return None

    def will(self, *names: str) -> bool:
        """Return whether the run contains one of these actions."""
        return any(action.name in names for action in self.actions)

    def is_broken(self, section: str) -> bool:
        """Return whether a section failed validation; its problems are already reported."""
        return self.sections[section] is None and section in self.written

    @property
    def has_valid_task(self) -> bool:
        """Whether the sections that determine `task` are valid; otherwise `task` is a default."""
        return not (self.is_broken("model") or self.is_broken("trainer"))

    def config_fields(self) -> dict[str, tuple[ValuePath, Any]]:
        """Return field of the model's configuration -> (the key that sets it, the value).

        Later sections override earlier ones, and all override the model's own configuration.
        """
        return {
            field: ((name, *path), value)
            for name, section in self.sections.items()
            if isinstance(section, SetsConfig)
            for field, (path, value) in section.config_fields().items()
        }

    def execution_fields(self) -> Mapping[str, Any]:
        """Return the execution fields of the run in canonical form, with their defaults."""
        fields = {**(self.model.config or {})} if self.model is not None else {}
        fields |= {"sharding_axis_names": self.sharding.axis_names}
        fields |= {"sharding_axis_dims": self.sharding.axis_dims}
        fields |= {name: value for name, (_, value) in self.config_fields().items()}
        named = {canonical_field(name): value for name, value in fields.items()}
        execution_values = {
            name: normalize_fields(name, value) for name, value in named.items() if name in FIELDS
        }
        return {name: execution_values.get(name, field.default) for name, field in FIELDS.items()}

    # Locations of errors.

    def error(self, problems: Sequence[Problem]) -> InputError:
        """Return the error for problems whose paths start at the top of the file."""
        return InputError(self.document, problems)

    def missing(self, section: str) -> InputError:
        """Return the error for a required section that is missing."""
        message = f"the section {section!r} is missing"
        return self.error([Problem(self.prefix, message, on_key=True)])

    def place(self, problem: Problem) -> Problem:
        """Convert a path that starts at the sections to the path that the user typed."""
        if not problem.path:
            return problem._replace(path=self.prefix)
        name, *inner_path = problem.path
        section = self.sections.get(name)
        cls = type(section) if section is not None else None
        typed = typed_path(inner_path, self.written.get(name), cls)
        absent = inner_path[len(typed) :][-1:]
        return problem._replace(path=(*self.prefix, name, *typed, *absent))

    def place_in(self, action: Action, problem: Problem) -> Problem:
        """Convert a path that starts at the parameters of an action."""
        parameters = value_at(self.document.value, action.parameter_path)
        typed = typed_path(problem.path, parameters, type(action.options))
        return problem._replace(path=(*action.parameter_path, *typed))

    def warning_texts(self) -> list[str]:
        """Return each warning as text, with its line, and one line about unneeded keys."""
        document = self.document
        problems = sorted(self.warnings, key=document.sort_key)
        notes = [f"{document.name}: {self.note}"] if self.note else []
        return [*map(document.show, problems), *notes]

    @contextmanager
    def blame(self, *path: str | int) -> Iterator[None]:
        """Locate input errors of the block at `path`, which starts at the sections."""
        with self.blame_at((*self.prefix, *path)):
            yield

    @contextmanager
    def blame_at(self, path: ValuePath) -> Iterator[None]:
        """Locate input errors of the block at `path`, which starts at the top of the file.

        A `MeshError` is located at `sharding.axis_dims`, and an error with a `field` at this key.
        Without a file errors are not changed.
        """
        try:
            yield
        except InputError:
            raise
        except (ConfigError, CheckpointError, DataError) as error:
            if not self.document.text:
                raise
            problem = Problem(path, str(error), on_key=True)
            key = getattr(error, "field", None)
            if isinstance(error, MeshError):
                problem = self.place(Problem(("sharding", "axis_dims"), str(error), on_key=True))
            elif key is not None:
                problem = problem._replace(path=self._find_key(path, key))
            elif isinstance(error, DataError) and error.path:
                problem = self.place(Problem(("mixture", *error.path), str(error)))
            raise self.error([problem]) from error

    @contextmanager
    def blame_trainer(self, path: ValuePath) -> Iterator[None]:
        """Locate input errors of the trainer at the written option that their message names first.

        Args:
            path: The location of the other errors, from the top of the file.
        """
        with self.blame_at(path):
            try:
                yield
            except ConfigError as error:
                trainer_values = self.written.get("trainer")
                if error.field is None and isinstance(trainer_values, Mapping):
                    words = re.findall(r"[a-z]\w*", str(error))
                    aliases = type(self.trainer).ALIASES if self.trainer is not None else {}
                    names = {aliases.get(str(key), str(key)) for key in trainer_values}
                    error.field = next((word for word in words if word in names), None)
                raise

    def _find_key(self, path: ValuePath, key: str) -> ValuePath:
        """Return the location of the key of an error in the block at `path`.

        Args:
            path: The block.
            key: A key of the block or of the trainer, or a dotted key that starts at the sections.
        """
        first, *inner_path = key.split(".")
        if first in self.sections and inner_path:
            return self.place(Problem((first, *inner_path), "")).path
        block = value_at(self.document.value, path)
        if isinstance(block, Mapping) and key in block:
            return (*path, key)
        if self.trainer is not None and key in type(self.trainer).model_fields:
            return self.place(Problem(("trainer", key), "")).path
        return path

    # As plain values.

    def to_dict(self) -> dict[str, Any]:
        """Return the canonical configuration as JSON values, with defaults and derived values.

        Values that are null by default are omitted.
        """
        out = {name: _dump(value) for name, value in self.sections.items() if value is not None}
        if self.actions:
            out["actions"] = [_dump_action(action) for action in self.actions]
        return out

    def to_yaml(self, *, secrets: bool = True) -> str:
        """Return the canonical configuration as YAML; parsing it yields the same run.

        Args:
            secrets: False replaces API keys by stars, for printed output.
        """
        values = self.to_dict()
        if not secrets:
            values["actions"] = [_without_secrets(action) for action in self.actions]
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)

    def to_json(self) -> str:
        """Return the canonical configuration as JSON."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"


def _dump(value: object) -> Any:
    if isinstance(value, pydantic.BaseModel):
        fields = type(value).model_fields
        items = ((name, getattr(value, name)) for name in fields)
        return {k: _dump(v) for k, v in items if v is not None or fields[k].default is not None}
    if isinstance(value, Mapping):
        return {key: _dump(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_dump_item(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, pydantic.SecretStr):
        return value.get_secret_value()
    if callable(value):
        # The readers of rows, which other values do not need, take a fifth of a second to import.
        from ed_data.sources.python import find_address

        name = getattr(value, "__qualname__", type(value).__name__)
        return find_address(value) or f"<{name} of {value.__module__} cannot be repeated>"
    return value


def _dump_item(value: object) -> Any:
    """Convert an entry of a list, only with the keys that were set: some kinds lack some keys."""
    if isinstance(value, pydantic.BaseModel):
        fields = type(value).model_fields
        return {k: _dump(getattr(value, k)) for k in fields if k in value.model_fields_set}
    return _dump(value)


def _dump_action(action: Action) -> Any:
    parameters = {key: getattr(action.options, key) for key in action.options.model_fields_set}
    return {action.name: _dump(parameters)} if parameters else action.name


def _without_secrets(action: Action) -> Any:
    hidden = {
        key: "**********"
        for key in action.options.model_fields_set
        if any(isinstance(one, pydantic.SecretStr) for one in _leaves(getattr(action.options, key)))
    }
    dumped = _dump_action(action)
    return {action.name: {**dumped[action.name], **hidden}} if hidden else dumped


def _leaves(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)
