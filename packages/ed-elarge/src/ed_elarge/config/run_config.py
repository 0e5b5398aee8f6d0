"""`RunConfig`: a checked configuration, with the place in the file that each value came from."""

from __future__ import annotations

import json
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
from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError, ConfigError, MeshError
from ed_infra.options import Options
from ed_trainers.arguments import METHODS, MethodEntry, TrainingArguments

from ed_elarge.config.adaptation import LoraSection, QuantizationSection, WeightFormat
from ed_elarge.config.sections import (
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
from ed_elarge.errors import Document, InputError, KeyPath, Problem


@dataclass(frozen=True)
class Action:
    """One thing to do, checked.

    Attributes:
        name: a key of `ed_elarge.config.table.ACTIONS`.
        options: its parameters.
        path: where it stands in the file.
        parameter_path: where its parameters stand.
    """

    name: str
    options: Any
    path: KeyPath
    parameter_path: KeyPath


class RunConfig:
    """A checked configuration: one attribute for each section of `ed_elarge.config.table.SECTIONS`.

    Sections that the user left out have their defaults; the models, `quantization`, `lora`,
    `mixture` and `trainer` have none and are None instead.

    Args:
        document: the file that it came from, so that a later error can point at a line; or a
            document that only holds a value.
        prefix: path of the mapping that holds the sections.
        written: the sections as the user wrote them.
        sections: name -> checked section.
        actions: what to do, in order.
        warnings: keys that have no effect, and the like.
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
    eval: EvalSection

    def __init__(
        self,
        document: Document,
        prefix: KeyPath,
        written: Mapping[str, Any],
        sections: Mapping[str, Options | Mixture | None],
        actions: Sequence[Action] = (),
        warnings: Sequence[Problem] = (),
    ) -> None:
        self.document = document
        self.prefix = prefix
        self.written = written
        self.sections = dict(sections)
        self.actions = tuple(actions)
        self.warnings = tuple(warnings)
        vars(self).update(self.sections)

    # What several sections say together.

    @property
    def directory(self) -> Path:
        """Where the run writes: the trainer's directory, or the working directory."""
        return Path(self.trainer.save_directory) if self.trainer is not None else Path()

    @property
    def folder(self) -> Path:
        """Folder of the run file; the working directory where the run comes from no file."""
        file = Path(self.document.name)
        return file.absolute().parent if file.is_file() else Path.cwd()

    @property
    def method(self) -> str:
        """The method of the trainer, such as `sft`; empty without one."""
        kind = type(self.trainer)
        return next((name for name, entry in METHODS.items() if entry.arguments is kind), "")

    @property
    def method_entry(self) -> MethodEntry:
        """What the method is and wants; without a trainer, that of `sft`."""
        return METHODS[self.method or "sft"]

    @property
    def tasks(self) -> tuple[TaskType, ...]:
        """Tasks of the models that the method trains; the first is the default."""
        return (self.method_entry.task, *self.method_entry.other_tasks)

    @property
    def task(self) -> TaskType:
        """Task of the model: `model.task`, or the default of the method.

        `auto-bind` stands for the task that the checkpoint names.
        """
        chosen = self.model.task if self.model is not None else None
        if self.trainer is None:
            return chosen or TaskType.CAUSAL_LM
        automatic = chosen == TaskType.AUTO_BIND and len(self.tasks) > 1
        return chosen if chosen in self.tasks or automatic else self.tasks[0]

    @property
    def schema(self) -> schemas.Schema:
        """What the rows of the mixture are, for the method of the trainer."""
        return getattr(schemas, self.method_entry.rows.upper())

    @property
    def takes_prompts(self) -> bool:
        """Whether the method is given prompts alone, which are not packed."""
        return self.method_entry.rows == "prompt"

    @property
    def batch_size(self) -> int:
        """Sequences of a batch; `normalize` has made trainer and mixture agree."""
        return (self.mixture.batch_size if self.mixture is not None else None) or 1

    @property
    def sequence_length(self) -> tuple[int | None, str]:
        """Tokens of one sequence, and the key that sets them.

        `mixture.pack_seq_length` when packing, else `trainer.max_length`, else
        `mixture.tokenization.max_length`.
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
        return next((c for c in candidates if c[0] is not None), (None, ""))

    @property
    def has_held_out(self) -> bool:
        """Whether the mixture sets texts aside for evaluation."""
        mixture = self.mixture
        return mixture is not None and bool(mixture.eval_fraction or mixture.eval_informs)

    @property
    def weight_format(self) -> WeightFormat | None:
        """How the weights of the model are quantized, if they are."""
        section = self.quantization
        return section.model if section is not None and section.apply_quantization else None

    @property
    def has_frozen_weights(self) -> bool:
        """Whether the weights are quantized, so that they cannot learn."""
        return self.weight_format is not None and not self.weight_format.simulate

    @property
    def adapters(self) -> LoraSection | None:
        """The adapters of the model: quantized weights cannot learn, so training needs some."""
        trains = self.trainer is not None and (self.will("train") or not self.actions)
        needed = trains and self.has_frozen_weights
        return LoraSection() if self.lora is None and needed else self.lora

    @property
    def known_model(self) -> dict[str, Any] | None:
        """The model's own configuration as far as it is known without a download."""
        model = self.model
        if model is None or model.config is not None:
            return model.config if model is not None else None
        path = Path(str(model.name_or_path)).expanduser() / "config.json"
        try:
            config = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return config if isinstance(config, dict) else None

    def will(self, *names: str) -> bool:
        """Whether one of these actions is to be done."""
        return any(action.name in names for action in self.actions)

    def is_broken(self, section: str) -> bool:
        """Whether the user wrote a section that did not validate: its mistakes are told already."""
        return self.sections[section] is None and section in self.written

    def config_fields(self) -> dict[str, tuple[KeyPath, Any]]:
        """Field of the model's configuration -> (the key that sets it, the value).

        Later sections come before earlier ones; all come before the model's own configuration.
        """
        return {
            field: ((name, *path), value)
            for name, section in self.sections.items()
            if isinstance(section, SetsConfig)
            for field, (path, value) in section.config_fields().items()
        }

    # Where errors point.

    def error(self, problems: Sequence[Problem]) -> InputError:
        """The error for problems whose paths start at the top of the file."""
        return InputError(self.document, problems)

    def missing(self, section: str) -> InputError:
        """The error for a section that something needs and that is not there."""
        message = f"the section {section!r} is missing"
        return self.error([Problem(self.prefix, message, on_key=True)])

    def place(self, problem: Problem) -> Problem:
        """A problem whose path starts at the sections, with the path that the user typed."""
        if not problem.path:
            return problem._replace(path=self.prefix)
        name, *rest = problem.path
        section = self.sections.get(name)
        cls = type(section) if section is not None else None
        typed = typed_path(rest, self.written.get(name), cls)
        absent = rest[len(typed) :][-1:]
        return problem._replace(path=(*self.prefix, name, *typed, *absent))

    def place_in(self, action: Action, problem: Problem) -> Problem:
        """The same for a problem whose path starts at the parameters of an action."""
        written = value_at(self.document.value, action.parameter_path)
        typed = typed_path(problem.path, written, type(action.options))
        return problem._replace(path=(*action.parameter_path, *typed))

    def warning_texts(self) -> list[str]:
        """Each warning as text, with its line."""
        document = self.document
        return [document.show(problem) for problem in sorted(self.warnings, key=document.sort_key)]

    @contextmanager
    def blame(self, *path: str | int) -> Iterator[None]:
        """Give errors of the input the place of `path`, which starts at the sections."""
        with self.blame_at((*self.prefix, *path)):
            yield

    @contextmanager
    def blame_at(self, path: KeyPath) -> Iterator[None]:
        """Give errors of the input the place of `path`, which starts at the top of the file.

        A mesh that does not fit is the fault of `sharding.axis_dims`, wherever it shows. Without a
        file errors pass as they are.
        """
        try:
            yield
        except InputError:
            raise
        except (ConfigError, CheckpointError, DataError) as error:
            if not self.document.text:
                raise
            problem = Problem(path, str(error), on_key=True)
            if isinstance(error, MeshError):
                problem = self.place(Problem(("sharding", "axis_dims"), str(error), on_key=True))
            elif isinstance(error, DataError) and error.path:
                problem = self.place(Problem(("mixture", *error.path), str(error)))
            raise self.error([problem]) from error

    # As plain values.

    def to_dict(self) -> dict[str, Any]:
        """The canonical configuration as JSON values, defaults and derived values included.

        Left out is what is absent by default (null).
        """
        out = {name: _dump(value) for name, value in self.sections.items() if value is not None}
        if self.actions:
            out["actions"] = [_dump_action(action) for action in self.actions]
        return out

    def to_yaml(self, *, secrets: bool = True) -> str:
        """The canonical configuration as YAML; reading it back gives the same run.

        Args:
            secrets: False writes stars instead of keys, for what is printed.
        """
        values = self.to_dict()
        if not secrets:
            values["actions"] = [_without_secrets(action) for action in self.actions]
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)

    def to_json(self) -> str:
        """The canonical configuration as JSON."""
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
    if callable(value):  # read back by name
        return f"{value.__module__}:{getattr(value, '__qualname__', value)}"
    return value


def _dump_item(value: object) -> Any:
    """An entry of a list: only the keys that were set, since some go with some kinds alone."""
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
