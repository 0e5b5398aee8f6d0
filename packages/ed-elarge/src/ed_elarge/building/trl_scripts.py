"""The arguments of a script of TRL as the sections of a run file.

The rules are those of TRL's files, `ed_elarge.migration.trl_files`. A file is converted with a
comment for each argument without a place; in a script, such an argument is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, ClassVar

from ed_infra.errors import ConfigError
from ed_trainers.arguments import ARGUMENTS, METHODS
from ed_trainers.options.online import OnlineArguments
from ed_trainers.options.other_names import HUGGING_FACE

from ed_elarge.config.normalize import normalize
from ed_elarge.config.other_files import build_run_sections, convert_keys
from ed_elarge.config.run_config import RunConfig
from ed_elarge.errors import Document, InputError, Problem
from ed_elarge.migration.conversion import Conversion, KeyRule
from ed_elarge.migration.shared_rules import PEFT_RULES
from ed_elarge.migration.trl_arguments import (
    OLDER_ARGUMENTS,
    OLDER_NAMES,
    PEFT_DEFAULTS,
    TRL_METHODS,
    TrlMethod,
)
from ed_elarge.migration.trl_files import MODEL_RULES, TRL_RULES, finish_arguments

#: Arguments that the trainer applies to the tokenizer itself.
TOKEN_ARGUMENTS = ("eos_token", "pad_token")
#: Origin of a value that the script does not set.
DEFAULT = "default of TRL"


def list_arguments(trl_method: TrlMethod) -> set[str]:
    """Return the names that the configuration of a method accepts.

    Further names are those of earlier versions of TRL, and the options of the method here.
    """
    options = ARGUMENTS[trl_method.method]
    return {
        *(*trl_method.defaults, *OLDER_NAMES, *OLDER_ARGUMENTS, *HUGGING_FACE),
        *(*options.model_fields, *options.ALIASES),
    } - {"trainer_type"}


def describe_unknown(owner: str, name: str, known_names: Iterable[str]) -> str:
    """Return the message for an argument that a class of TRL does not have.

    Args:
        owner: the class.
        name: the argument.
        known_names: the arguments of the class.
    """
    near = get_close_matches(name, list(known_names), 1)
    hint = f"did you mean {near[0]!r}?" if near else "see docs/migrate/trl.md"
    others = [f"{one.name}Config" for one in TRL_METHODS.values() if name in one.defaults]
    if owner.endswith("Config") and others:
        hint = f"it is an argument of {', '.join(others)}"
    return f"{owner} has no argument {name!r}; {hint}"


def convert_arguments(
    trl_method: TrlMethod, given: Mapping[str, object], devices: int
) -> Conversion:
    """Convert the arguments of a configuration of TRL.

    Args:
        trl_method: the method.
        given: the arguments that the script sets; the others have the defaults of TRL.
        devices: number of devices, for sizes of batches per device.

    Raises:
        ConfigError: an argument changes the result and has no place here.
    """
    defaults = trl_method.defaults
    named = {OLDER_NAMES.get(name, name): value for name, value in given.items()}
    values = {
        name: value
        for name, value in named.items()
        if name not in defaults or value != defaults[name]
    }
    source = {**defaults, **values}
    source = {
        name: value
        for name, value in source.items()
        if value is not None and name not in TOKEN_ARGUMENTS
    }
    conversion = Conversion(source, "TRL", devices=devices, method=trl_method.method)
    convert_keys(conversion, TRL_RULES, finish_arguments)
    fields = ARGUMENTS[trl_method.method].model_fields
    for path, origin in list(conversion.origins.items()):
        section, _, name = path.partition(".")
        is_default = all(one not in values for one in re.findall(r"\w+", origin))
        if is_default and section == "trainer" and name not in fields:
            del conversion.values[path]  # an argument of TRL without effect on this method
        elif is_default:
            conversion.origins[path] = DEFAULT
    for name, value in values.items():
        if value is None and defaults.get(name) is not None:
            path = find_path(conversion, name)
            conversion.values |= {path: None} if path else {}
    for name in [name for name in conversion.omitted if name.partition(".")[0] not in values]:
        del conversion.omitted[name]
    for name in [name for name in conversion.changes if name.partition(".")[0] not in values]:
        del conversion.changes[name]
    refuse_changes(conversion, f"{trl_method.name}Config", values)
    return conversion


def find_path(conversion: Conversion, name: str) -> str | None:
    """Return the path of a run file that an argument without a value sets."""
    rule = TRL_RULES.get(name)
    place = f"trainer.{name}" if rule is None else rule.place
    option = place.removeprefix("trainer.")
    return place if option in ARGUMENTS[conversion.method].model_fields else None


def refuse_changes(conversion: Conversion, owner: str, values: Mapping[str, object]) -> None:
    """Raise an error if an argument changes the result and has no place.

    Raises:
        ConfigError: there is such an argument.
    """
    for name, advice in conversion.changes.items():
        value = values.get(name.partition(".")[0])
        raise ConfigError(
            f"{owner}: {name}={value!r:.100} changes the result, and has no counterpart here: "
            f"{advice}. Omit it"
        )


def convert_adapters(conversion: Conversion, peft_config: object) -> None:
    """Set the section `lora` from `peft.LoraConfig`, or from a mapping of its arguments.

    Raises:
        ConfigError: an argument is unknown, or has no counterpart.
    """
    get_values = getattr(peft_config, "to_dict", None)
    given = peft_config if get_values is None else get_values()
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"peft_config is a {type(peft_config).__name__}: pass peft.LoraConfig(...) or a "
            "mapping of its arguments"
        )
    for name in given:
        if name not in PEFT_DEFAULTS and get_values is None:
            raise ConfigError(describe_unknown("LoraConfig", str(name), PEFT_DEFAULTS))
    kind = str(getattr(given.get("peft_type"), "value", given.get("peft_type") or "LORA"))
    if kind != "LORA":
        raise ConfigError(f"peft_config has the type {kind}: adapters here are LoRA")
    adapters = Conversion({}, "PEFT", method=conversion.method)
    for name, value in {**PEFT_DEFAULTS, **given}.items():
        rule = PEFT_RULES.get(name)
        if isinstance(value, set | frozenset | tuple):
            value = sorted(value) if isinstance(value, set | frozenset) else list(value)
        if value is None or name == "peft_type":
            continue
        if rule is not None:
            rule.convert(adapters, name, value)
        elif value != PEFT_DEFAULTS.get(name):
            adapters.changes[name] = "adapters have rank, alpha, dropout and targets"
    refuse_changes(adapters, "LoraConfig", given)
    conversion.values |= adapters.values
    conversion.origins |= adapters.origins


def build_placeholders(trl_method: TrlMethod) -> dict[str, dict[str, object]]:
    """Return the sections that a configuration does not have: model and data."""
    roles = METHODS[trl_method.method].needs
    return {
        "mixture": {"informs": [{"type": "json", "data_files": "rows.jsonl"}]},
        **{name: {"name_or_path": "a model"} for name in ("model", *(f"{r}_model" for r in roles))},
    }


def build_run(
    conversion: Conversion,
    owner: str,
    further: Mapping[str, Mapping[str, object]],
    positions: int | None = None,
) -> RunConfig:
    """Return the run of a conversion.

    The default lengths of TRL are reduced to the positions of the model.

    Args:
        conversion: the converted arguments.
        owner: the class of TRL, for messages.
        further: section -> values that no argument of TRL sets.
        positions: the positions of a model that the script gives; None: those of its files.

    Raises:
        ConfigError: a value is invalid; the message names the argument of TRL.
    """
    length = "trainer.max_length"
    try:
        run = _normalize(conversion, owner, further)
    except InputError as error:
        is_too_long = any(problem.path == ("trainer", "max_length") for problem in error.problems)
        if not is_too_long or conversion.origins.get(length) != DEFAULT:
            problems = [name_argument(conversion, problem) for problem in error.problems]
            raise ConfigError(f"{owner}: {'; '.join(problems)}") from None
        del conversion.values[length], conversion.origins[length]
        return build_run(conversion, owner, further, positions)
    positions = run.known_positions or positions
    trainer = run.trainer
    if positions is None or trainer is None:
        return run
    changes: dict[str, object] = {}
    default_length = conversion.values.get(length)
    if isinstance(default_length, int) and conversion.origins.get(length) == DEFAULT:
        changes = {length: positions} if default_length > positions else {}
    if isinstance(trainer, OnlineArguments) and "trainer.max_prompt_length" not in (
        conversion.values
    ):
        room = positions - trainer.max_completion_length
        if 0 < room < trainer.max_prompt_length:
            changes["trainer.max_prompt_length"] = room
    if not changes:
        return run
    conversion.values |= changes
    return build_run(conversion, owner, further, positions)


def _normalize(
    conversion: Conversion, owner: str, further: Mapping[str, Mapping[str, object]]
) -> RunConfig:
    sections = dict(build_run_sections(conversion))
    for name, values in further.items():
        section = sections.get(name) or {}
        assert isinstance(section, dict), name
        sections[name] = {**section, **values}
    return normalize(Document(f"the arguments of {owner}", value=sections))


def name_argument(conversion: Conversion, problem: Problem) -> str:
    """Return the message of a problem, with the argument of TRL that has the value."""
    parts = [str(part) for part in problem.path]
    for length in range(len(parts), 0, -1):
        origin = conversion.origins.get(".".join(parts[:length]))
        if origin is not None and origin != DEFAULT:
            return f"{origin}: {problem.message}"
    return f"{'.'.join(parts)}: {problem.message}"


def convert_model_options(options: Mapping[str, object]) -> dict[str, object]:
    """Return keywords of `from_pretrained` here, for those of transformers.

    Raises:
        ConfigError: an option is unknown, or changes the result and has no counterpart.
    """
    conversion = Conversion(dict(options), "transformers")
    for name, value in options.items():
        rule: KeyRule | None = MODEL_RULES.get(name)
        if rule is None:
            raise ConfigError(describe_unknown("from_pretrained", name, MODEL_RULES))
        if value is not None:
            rule.convert(conversion, name, value)
    refuse_changes(conversion, "from_pretrained", options)
    places = {
        "loader.param_dtype": "param_dtype",
        "model.extra_kwargs.revision": "revision",
    }
    converted = {places[path]: value for path, value in conversion.values.items() if path in places}
    method = conversion.values.get("quantization.model.quantization_method")
    if method is not None:
        double = bool(conversion.values.get("quantization.model.double_quantization"))
        converted["quantization_config"] = {"dtype": method} | (
            {"double_quantization": True} if double else {}
        )
        converted["apply_quantization"] = True
    return converted


class TrlConfig:
    """The arguments of a trainer of TRL, with their names and defaults.

    Attributes are the arguments; they can be set later, too.

    Attributes:
        trl_method: the method.
        given: the arguments that the script sets.

    Raises:
        ConfigError: an argument is unknown, or invalid, or has no counterpart here.
    """

    trl_method: ClassVar[TrlMethod]
    given: dict[str, object]

    def __init__(self, output_dir: object = None, **arguments: object) -> None:
        object.__setattr__(self, "given", {})
        if output_dir is not None:
            self.given["output_dir"] = str(output_dir)
        for name, value in arguments.items():
            setattr(self, name, value)
        self.validate()

    def validate(self) -> None:
        """Check the values, as the trainer does.

        Raises:
            ConfigError: a value is invalid.
        """
        conversion = convert_arguments(self.trl_method, self.given, 1)
        build_run(conversion, type(self).__name__, build_placeholders(self.trl_method))

    def __setattr__(self, name: str, value: object) -> None:
        known_names = list_arguments(self.trl_method)
        if name not in known_names:
            raise ConfigError(describe_unknown(type(self).__name__, name, known_names))
        self.given[OLDER_NAMES.get(name, name)] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        present_name = OLDER_NAMES.get(name, name)
        if present_name in self.given:
            return self.given[present_name]
        known_names = list_arguments(self.trl_method)
        if name not in known_names:
            raise AttributeError(describe_unknown(type(self).__name__, name, known_names))
        return self.trl_method.defaults.get(present_name)

    def to_dict(self) -> dict[str, object]:
        """Return all arguments with their values."""
        return {**self.trl_method.defaults, **self.given}

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.given.items())
        return f"{type(self).__name__}({values})"
