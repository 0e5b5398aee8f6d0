"""A file of another program as a commented run file."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from ed_infra.errors import ConfigError, did_you_mean, unknown_name
from ed_trainers.arguments import METHODS

from ed_elarge.config.normalize import normalize
from ed_elarge.config.other_files import build_run_sections, convert_keys
from ed_elarge.errors import Document, InputError, Problem
from ed_elarge.migration.axolotl import AXOLOTL_RULES, find_method, finish_axolotl
from ed_elarge.migration.conversion import Conversion, KeyRule
from ed_elarge.migration.llama_factory import (
    LLAMA_FACTORY_RULES,
    find_stage,
    finish_llama_factory,
)
from ed_elarge.migration.trl_files import TRL_RULES, find_trl_method, finish_trl
from ed_elarge.migration.unsloth import UNSLOTH_RULES, finish_unsloth


@dataclass(frozen=True)
class ForeignProgram:
    """A program whose files are converted.

    Attributes:
        name: its name for people.
        marks: keys that only files of the program have.
        rules: key -> its rule.
        finish: sets values that depend on several keys, and defaults.
        find_method: returns the method of a file; None: the file does not name it.
    """

    name: str
    marks: frozenset[str]
    rules: Mapping[str, KeyRule]
    finish: Callable[[Conversion], None]
    find_method: Callable[[Mapping[str, object]], str | None]


#: Value of `--tool` -> the program.
PROGRAMS: dict[str, ForeignProgram] = {
    "axolotl": ForeignProgram(
        "Axolotl",
        frozenset(("base_model", "micro_batch_size", "sequence_len", "sample_packing")),
        AXOLOTL_RULES,
        finish_axolotl,
        lambda source: find_method(source)[0],
    ),
    "llamafactory": ForeignProgram(
        "LLaMA-Factory",
        frozenset(("stage", "finetuning_type", "cutoff_len", "template", "dataset_dir")),
        LLAMA_FACTORY_RULES,
        finish_llama_factory,
        lambda source: find_stage(source)[0],
    ),
    "unsloth": ForeignProgram(
        "Unsloth",
        frozenset(("training.max_seq_length", "training.training_type", "data.dataset")),
        UNSLOTH_RULES,
        finish_unsloth,
        lambda source: "sft",
    ),
    "trl": ForeignProgram(
        "TRL",
        frozenset(
            (
                *("dataset_name", "datasets", "use_peft", "max_length", "dataset_train_split"),
                *("per_device_train_batch_size", "assistant_only_loss", "packing"),
            )
        ),
        TRL_RULES,
        finish_trl,
        find_trl_method,
    ),
}
#: Values that a user has to replace; they are never removed.
_KEPT = ("model.name_or_path", "mixture.informs", "trainer.reward_functions")
#: Sections of Unsloth's files, whose keys have their section as a prefix.
_NESTED = ("data", "training", "lora", "logging")


def read_foreign_file(path: Path) -> dict[str, object]:
    """Return the keys of a YAML or JSON file.

    Raises:
        ConfigError: the file is not readable, or is no mapping.
    """
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        near = did_you_mean(path.name, [file.name for file in path.parent.glob("*.*")])
        raise ConfigError(f"{path}: no such file{near}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not readable: {error}") from None
    if len(text) > 1_000_000:
        raise ConfigError(f"{path} has {len(text):,} characters: a run has at most 1,000,000")
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is no YAML: {error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must have keys and values at its top")
    values: dict[str, object] = {}
    for key, value in document.items():
        if "training" in document and key in _NESTED and isinstance(value, Mapping):
            values |= {f"{key}.{name}": item for name, item in value.items()}
        else:
            values[str(key)] = value
    return {key: value for key, value in values.items() if value is not None}


def find_program(source: Mapping[str, object], path: Path) -> str:
    """Return the program to which a file belongs.

    Raises:
        ConfigError: the keys belong to no program.
    """
    counts = {name: len(one.marks & source.keys()) for name, one in PROGRAMS.items()}
    name = max(counts, key=lambda name: counts[name])
    if counts[name] == 0:
        raise ConfigError(
            f"{path} has no key that only one program has: name the program, "
            f"--tool {' | '.join(PROGRAMS)}"
        )
    return name


def convert_foreign_file(
    path: Path, *, tool: str | None = None, method: str | None = None, devices: int = 1
) -> Conversion:
    """Convert a file of another program.

    Args:
        path: the file.
        tool: a key of `PROGRAMS`; None: by the keys of the file.
        method: the method, which a file of TRL need not name; None: by the keys.
        devices: number of devices of the run.

    Raises:
        ConfigError: the program is unknown, the file is not readable, or a value is invalid.
    """
    source = read_foreign_file(path)
    if tool is not None and tool not in PROGRAMS:
        raise unknown_name("tool", tool, PROGRAMS)
    program = PROGRAMS[tool or find_program(source, path)]
    found_method = program.find_method(source)
    conversion = Conversion(source, program.name, path.parent, devices)
    if method is not None and method not in METHODS:
        raise unknown_name("method", method, METHODS)
    conversion.method = method or found_method or "sft"
    if method is None and found_method is None:
        conversion.omitted["trainer_type"] = (
            f"no key names the method, so it is sft: elarge init METHOD --from {path.name}"
        )
    convert_keys(conversion, program.rules, program.finish)
    if "model.name_or_path" not in conversion.values:
        conversion.put("model.name_or_path", "ORGANIZATION/MODEL")
        conversion.changes["model"] = "the file names no model"
    _remove_invalid_values(conversion)
    return conversion


def _remove_invalid_values(conversion: Conversion) -> None:
    """Remove values that the run file would refuse, such as an option of another method."""
    for _ in range(len(conversion.values)):
        document = Document(
            "the run file", value={**build_run_sections(conversion), "actions": "train"}
        )
        try:
            run = normalize(document, require_actions=True)
        except InputError as error:
            if not _remove_values(conversion, error.problems, conversion.changes, "is refused: "):
                return
        else:
            _remove_values(conversion, run.warnings, conversion.omitted, "")
            return


def _remove_values(
    conversion: Conversion, problems: Sequence[Problem], remarks: dict[str, str], prefix: str
) -> bool:
    """Remove the values to which problems belong, and return whether there were some."""
    count = len(conversion.values)
    for problem in problems:
        parts = [str(part) for part in problem.path]
        for length in range(len(parts), 1, -1):
            path = ".".join(parts[:length])
            if path in conversion.values and path not in _KEPT:
                value = conversion.values.pop(path)
                key = conversion.origins.pop(path, path)
                key = path if key.startswith("default of ") else key
                remarks[key] = f"{path}: {value} {prefix}{problem.message}"
                break
    return len(conversion.values) < count


def format_run_file(conversion: Conversion, origin: str, file: str) -> str:
    """Return the text of the run file.

    Args:
        conversion: the converted values.
        origin: name of the file of the other program.
        file: name of the run file.
    """
    lines = [f"# From {origin} of {conversion.program}.", "#"]
    lines += [f"#   elarge {file} --dry-run    check the file", "#"]
    if conversion.changes:
        lines += ["# CHECK: these keys change the result, and this file does not have them:"]
        lines += _format_remarks(conversion.changes)
    if conversion.omitted:
        lines += ["# These keys are not needed:", *_format_remarks(conversion.omitted)]
    for name, section in build_run_sections(conversion).items():
        lines += ["", *_format_value(name, section, (name,), conversion.origins)]
    lines += ["", "actions: [validate, train]"]
    return "\n".join(lines) + "\n"


def _format_remarks(remarks: Mapping[str, str]) -> list[str]:
    lines = []
    for key, text in remarks.items():
        first, *rest = textwrap.wrap(f"{key}: {text}", 96, break_long_words=False)
        lines += [f"#   {first}", *(f"#     {line}" for line in rest)]
    return [*lines, "#"]


def _format_value(
    name: str, value: object, path: tuple[str, ...], origins: Mapping[str, str]
) -> list[str]:
    """Return the lines of a key, with the key of the other program as a comment."""
    indent = "  " * (len(path) - 1)
    origin = origins.get(".".join(path))
    comment = f" # {origin}" if origin and origin != name else ""
    if isinstance(value, dict) and value and path[-1] not in ("optimizer_kwargs",):
        lines = [f"{indent}{name}:{comment}"]
        for key, item in value.items():
            lines += _format_value(str(key), item, (*path, str(key)), origins)
        return lines
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        lines = [f"{indent}{name}:{comment}"]
        for item in value:
            text = yaml.safe_dump(item, sort_keys=False, allow_unicode=True, width=10_000)
            lines += textwrap.indent(text.rstrip(), f"{indent}    ").splitlines()
            first = len(lines) - len(text.rstrip().splitlines())
            lines[first] = f"{indent}  - {lines[first].strip()}"
        return lines
    return [f"{indent}{name}: {_format_plain(value)}{comment}"]


def _format_plain(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")
