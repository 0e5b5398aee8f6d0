"""The tables of sections and actions of a run file.

A row contains the option class, further checks, and the functions that build or execute the section
or action. Validation, building, documentation and the command line use these rows, so a new section
or action is one row and its code.

A function that imports jax is given as an address (`"module:function"`), so that this table and the
validation of a run file do not import jax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ed_data.config import Mixture
from ed_esurge.config import EngineConfig
from ed_infra.errors import did_you_mean, unknown_name
from ed_infra.options import Options
from ed_trainers.arguments import ARGUMENTS, ROLES

from ed_elarge.config.action_options import (
    EvalOptions,
    GenerateOptions,
    NoOptions,
    ServeOptions,
    TranscribeOptions,
    WriteOptions,
)
from ed_elarge.config.adaptation import LoraSection, QuantizationSection
from ed_elarge.config.checks import machine, model_fields, requirements, training, unused
from ed_elarge.config.other_files import place
from ed_elarge.config.run_config import Action, RunConfig
from ed_elarge.config.sections import (
    AsynchronousSection,
    BaseConfigSection,
    EvalSection,
    LoaderSection,
    ModelSection,
    OtherModelSection,
    PlatformSection,
    ShardingSection,
    TrainingEngineSection,
)
from ed_elarge.errors import Problem, ValuePath

SectionCheck = Callable[[RunConfig], Iterable[Problem]]
ActionCheck = Callable[[RunConfig, Action], Iterable[Problem]]
FindUnused = Callable[[Any, RunConfig], unused.Unused]


@dataclass(frozen=True)
class Section:
    """One section of a run file.

    Attributes:
        options: The option class; or value -> class, if the key `chosen_by` selects the class.
        chosen_by: The key that selects the class; the default is the first class.
        has_default: Whether an omitted section has its defaults; otherwise it is None.
        checks: Checks that need several keys and do not depend on the machine.
        machine_checks: Checks of files, functions and ports on this machine.
        unused: Finds keys without effect because of other keys.
        builds: Part -> address of its builder, a function of `eLargeModel`.
        finishes: Address of a function of `(eLargeModel, model)` that returns the adapted model.
    """

    options: type[Options] | type[Mixture] | Mapping[str, type[Options]]
    chosen_by: str = ""
    has_default: bool = True
    checks: tuple[SectionCheck, ...] = ()
    machine_checks: tuple[SectionCheck, ...] = ()
    unused: FindUnused | None = None
    builds: Mapping[str, str] = field(default_factory=dict)
    finishes: str = ""

    def classes(self) -> Mapping[str, type[Options] | type[Mixture]]:
        """Return the option classes by the value that selects them."""
        return self.options if isinstance(self.options, Mapping) else {"": self.options}

    def choose_kind(self, value: object, path: ValuePath) -> str | Problem:
        """Return the key of `classes` that a value selects, or what is wrong with it."""
        classes = self.classes()
        kind = next(iter(classes))
        if not self.chosen_by or not isinstance(value, Mapping):
            return kind
        for key in value if self.chosen_by not in value else ():
            # The other keys would be checked against the wrong class.
            if hint := did_you_mean(str(key), [self.chosen_by]):
                return Problem((*path, key), f"unknown key {key!r}{hint}", on_key=True)
        kind = value.get(self.chosen_by, kind)
        if isinstance(kind, str) and kind not in classes:
            kind = kind.lower().replace("-", "_")
        if isinstance(kind, str) and kind in classes:
            return kind
        message = str(unknown_name(self.chosen_by, value[self.chosen_by], classes))
        return Problem((*path, self.chosen_by), message)


#: The sections, in the order in which they are checked, written out and described.
SECTIONS: dict[str, Section] = {
    "model": Section(
        ModelSection,
        has_default=False,
        checks=(
            model_fields.check_model_config,
            model_fields.check_tokenizer_section,
            model_fields.check_parametrization,
            training.task,
        ),
        machine_checks=(machine.check_model, training.task_of_checkpoint),
        unused=unused.find_unused_model,
        builds={
            "tokenizer": "ed_elarge.building.parts:build_tokenizer",
            "processor": "ed_elarge.building.parts:processor",
            "model": "ed_elarge.building.parts:build_model",
        },
    ),
    **{
        role.section: Section(
            OtherModelSection,
            has_default=False,
            machine_checks=(partial(machine.other_model, section=role.section),),
            builds={role.name: f"ed_elarge.building.parts:ROLE_MODELS.{role.name}"},
        )
        for role in ROLES.values()
    },
    "quantization": Section(
        QuantizationSection,
        has_default=False,
        checks=(model_fields.frozen_weights,),
        unused=unused.find_unused_quantization,
    ),
    "lora": Section(
        LoraSection,
        has_default=False,
        checks=(model_fields.adapters_or_rules, model_fields.initial_adapters),
        machine_checks=(machine.adapter,),
        finishes="ed_elarge.building.parts:add_adapters",
    ),
    "loader": Section(LoaderSection, finishes="ed_elarge.building.parts:show_parameters"),
    "sharding": Section(
        ShardingSection,
        checks=(model_fields.sharding_fields, model_fields.mesh_axes, model_fields.mesh_sizes),
    ),
    "platform": Section(PlatformSection),
    "base_config": Section(
        BaseConfigSection,
        checks=(
            model_fields.base_config,
            model_fields.conflicting_fields,
            model_fields.quantization_fields,
        ),
    ),
    "mixture": Section(
        Mixture,
        has_default=False,
        checks=(
            training.check_sequence_length,
            training.visual_rows,
            training.check_speech_rows,
            training.data_of_task,
            model_fields.end_of_text,
        ),
        machine_checks=(machine.check_data,),
        unused=unused.find_unused_mixture,
        builds={
            "loaders": "ed_elarge.building.parts:loaders",
            "held_out_texts": "ed_elarge.building.parts:held_out_texts",
        },
    ),
    "trainer": Section(
        ARGUMENTS,
        chosen_by="trainer_type",
        has_default=False,
        checks=(
            training.check_other_models,
            training.benchmarks,
            training.data_of_trainer,
            training.fixed_reference,
            training.rewards,
            requirements.check_requirements,
        ),
        machine_checks=(
            machine.save_directory,
            machine.reward_functions,
            machine.tools,
            machine.trackers,
        ),
        unused=unused.find_unused_trainer,
        builds={
            "trainer": "ed_elarge.building.parts:build_trainer",
            "tools": "ed_elarge.building.tools:build_tools",
        },
    ),
    "esurge": Section(
        EngineConfig,
        unused=unused.find_unused_engine,
        builds={
            "engine": "ed_elarge.building.engines:build_engine",
            "rollout": "ed_elarge.building.engines:build_rollout",
        },
    ),
    "training_engine": Section(
        TrainingEngineSection,
        has_default=False,
        checks=(training.engine_of_training,),
        unused=unused.find_unused_training_engine,
    ),
    "asynchronous": Section(
        AsynchronousSection,
        has_default=False,
        checks=(training.asynchronous,),
        machine_checks=(machine.environment,),
    ),
    "eval": Section(
        EvalSection,
        checks=(training.evaluation_tasks,),
        machine_checks=(machine.include_path, machine.local_tasks),
        unused=unused.find_unused_evaluation,
    ),
}


def unknown_section(name: object) -> str:
    """The message for a section that does not exist."""
    if instead := place(str(name)):
        hint = instead if instead.startswith("omit it") else f"use {instead}"
        return f"unknown section {name!r}; {hint}"
    section_names = [*SECTIONS, "actions"]
    suggestion = did_you_mean(str(name), section_names)
    return f"unknown section {name!r}{suggestion} (known: {', '.join(section_names)})"


@dataclass(frozen=True)
class ActionKind:
    """One action of a run file.

    Attributes:
        doc: One line for messages.
        function: Address of the function of `(Session, options)` that executes the action.
        options: Class of its parameters.
        scalar: The parameter that `name: VALUE` sets, if any.
        aliases: Other spellings.
        needs: Required sections.
        prepare: Address of a function of `(eLargeModel, options)` that raises errors of the action
            before the first action starts. Actions with this function import jax.
        checks: Checks of the parameters that do not depend on the machine.
        machine_checks: Checks of files and ports on this machine.
        unused: Finds parameters without effect because of other parameters.
    """

    doc: str
    function: str
    options: type[Options] = NoOptions
    scalar: str | None = None
    aliases: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    prepare: str = ""
    checks: tuple[ActionCheck, ...] = ()
    machine_checks: tuple[ActionCheck, ...] = ()
    unused: FindUnused | None = None


def _write(doc: str, function: str, *aliases: str) -> ActionKind:
    file_checks = (machine.written_file,)
    return ActionKind(
        doc, function, WriteOptions, scalar="path", aliases=aliases, machine_checks=file_checks
    )


ACTIONS: dict[str, ActionKind] = {
    "validate": ActionKind(
        "check the configuration", "ed_elarge.actions.execution:validate_session", needs=("model",)
    ),
    "print": ActionKind(
        "print a summary of the configuration",
        "ed_elarge.actions.execution:show_session",
        aliases=("show",),
    ),
    "dump_config": ActionKind(
        "print the whole configuration, defaults included",
        "ed_elarge.actions.execution:dump_config",
        aliases=("print_config", "config"),
    ),
    "to_json": _write(
        "save the whole configuration as JSON",
        "ed_elarge.actions.execution:write_json_config",
        "save_json",
        "write_json",
    ),
    "to_yaml": _write(
        "save the whole configuration as YAML",
        "ed_elarge.actions.execution:to_yaml",
        "save_yaml",
        "write_yaml",
    ),
    "train": ActionKind(
        "train the model",
        "ed_elarge.actions.execution:train_session",
        needs=("model", "trainer", "mixture"),
        prepare="ed_elarge.actions.execution:prepare_train",
    ),
    "eval": ActionKind(
        "evaluate with lm-evaluation-harness, or on local tasks",
        "ed_elarge.actions.execution:evaluate_session",
        EvalOptions,
        needs=("model",),
        prepare="ed_elarge.actions.execution:prepare_eval",
        checks=(training.action_tasks, training.evaluates),
        machine_checks=(machine.written_file,),
        unused=unused.find_unused_evaluation,
    ),
    "generate": ActionKind(
        "print completions",
        "ed_elarge.actions.execution:generate_session",
        GenerateOptions,
        scalar="prompts",
        needs=("model",),
        prepare="ed_elarge.actions.execution:prepare_model",
        checks=(training.generates,),
        unused=unused.find_unused_generation,
    ),
    "transcribe": ActionKind(
        "print transcripts of recordings",
        "ed_elarge.actions.transcribe:transcribe",
        TranscribeOptions,
        scalar="files",
        needs=("model",),
        prepare="ed_elarge.actions.execution:prepare_model",
        checks=(training.transcribes,),
        machine_checks=(machine.check_recordings,),
    ),
    "serve": ActionKind(
        "serve an OpenAI-compatible API",
        "ed_elarge.actions.execution:serve_session",
        ServeOptions,
        aliases=("server",),
        needs=("model",),
        prepare="ed_elarge.actions.execution:prepare_model",
        machine_checks=(machine.check_serve,),
    ),
}

#: Other spelling -> action.
ACTION_ALIASES: dict[str, str] = {
    alias: name for name, kind in ACTIONS.items() for alias in kind.aliases
}


def canonical_action(name: object) -> str | None:
    """The action that a spelling names (`Save-JSON` -> `to_json`), or None."""
    spelling = str(name).lower().replace("-", "_")
    spelling = ACTION_ALIASES.get(spelling, spelling)
    return spelling if spelling in ACTIONS else None


def unknown_action(name: object) -> str:
    """Return the message for an unknown action."""
    hint = did_you_mean(str(name), [*ACTIONS, *ACTION_ALIASES])
    return f"unknown action {name!r}{hint} (known: {', '.join(ACTIONS)})"


def check_machine(run: RunConfig) -> None:
    """Check the files, functions and ports of a run on this machine.

    Raises:
        InputError: One of them is missing or not accessible.
    """
    problems = [
        run.place(problem)
        for section in SECTIONS.values()
        for check in section.machine_checks
        for problem in check(run)
    ]
    problems += [
        run.place_in(action, problem)
        for action in run.actions
        for check in ACTIONS[action.name].machine_checks
        for problem in check(run, action)
    ]
    if problems:
        raise run.error(problems)
