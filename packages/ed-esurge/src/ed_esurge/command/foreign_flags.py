"""Command lines of vLLM and llama.cpp in the flags of `esurge serve`.

A flag is translated into a flag of this program, or has no effect for a reason that is printed, or
is refused with the way out. Flags that this program has under the same name are not in the tables
(`vllm_flags`, `llama_cpp_flags`), unless a value differs. The tables of the pages in docs/migrate
are generated from them.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ed_infra.errors import ConfigError

from ed_esurge.command.foreign_flag import OVERRIDE, ForeignFlag
from ed_esurge.command.llama_cpp_flags import LLAMA_CPP_FLAGS
from ed_esurge.command.vllm_flags import VLLM_FLAGS

#: Key of `Context.meta` with the flags of another server that have no effect.
NOTES = "ed_esurge.notes"
FOREIGN_FLAGS = (*VLLM_FLAGS, *LLAMA_CPP_FLAGS)
_TABLE = {name: flag for flag in FOREIGN_FLAGS for name in flag.names}


@dataclass
class TranslatedWords:
    """A command line in the flags of this program.

    Attributes:
        models: models that flags name.
        flags: each flag with its values, and each word that is not translated.
        notes: flags without an effect, each with its reason.
    """

    models: list[str] = field(default_factory=list)
    flags: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        """The command line."""
        return [*self.models, *chain.from_iterable(self.flags)]


def translate_flags(words: Sequence[str]) -> TranslatedWords:
    """Replace flags of vLLM and llama.cpp by those of this program.

    Args:
        words: the words of a command line. Flags that are not in the table stay as they are, with
            dashes for underscores.

    Raises:
        ConfigError: a flag is refused, or its value has no counterpart.
    """
    return _translate(words, {word.partition("=")[0] for word in words})


def translate_entries(
    values: Mapping[object, object],
) -> tuple[dict[object, object], list[str]]:
    """Replace flags of vLLM and llama.cpp in a file of flags by those of this program.

    Args:
        values: flag without leading dashes -> its value; a flag without a value is true or false.

    Returns:
        The entries here, and the flags without an effect, each with its reason.

    Raises:
        ConfigError: a flag is refused, or its value has no counterpart.
    """
    entries: dict[object, object] = {}
    words: list[str] = []
    for key, value in values.items():
        name = f"--{str(key).replace('_', '-')}"
        flag = _TABLE.get(name)
        if flag is None:
            entries[key] = value
        elif not flag.is_switch:
            words.append(f"{name}={value if isinstance(value, str) else json.dumps(value)}")
        elif not isinstance(value, bool):
            raise ConfigError(f"{key} must be true or false, got {value!r}")
        elif value:
            words.append(name)
    translated = _translate(words, {f"--{str(key).replace('_', '-')}" for key in values})
    if translated.models:
        raise ConfigError("model is no flag here: name the model on the command line")
    for name, *texts in translated.flags:
        entries[name.removeprefix("--")] = texts if len(texts) > 1 else texts[0] if texts else True
    return entries, translated.notes


def _translate(words: Sequence[str], given_flags: Collection[str]) -> TranslatedWords:
    result = TranslatedWords()
    overrides: dict[str, object] = {}
    remaining = deque(words)
    while remaining:
        word = remaining.popleft()
        if word == "--":
            result.flags.append((word, *remaining))
            break
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        flag = _TABLE.get(name)
        if flag is None or not (flag.is_switch or equals or remaining):
            result.flags.append((f"{name}{equals}{value}",))  # the parser reports a missing value
            continue
        if flag.is_switch:
            value = flag.value
        elif not equals:
            value = remaining.popleft()
        is_said = not set(flag.unless).isdisjoint(given_flags)
        converted = None if is_said else _convert(flag, name, value)
        if converted is None:
            result.notes.append(f"{name} ({flag.note})")
        elif flag.target == "MODEL":
            result.models += converted
        elif flag.target == OVERRIDE:
            overrides |= parse_mapping(converted[0], name)
        else:
            result.flags.append((flag.target, *filter(None, converted)))
    if overrides:
        result.flags.append((OVERRIDE, json.dumps(overrides)))
    return result


def parse_mapping(text: str | None, flag: str) -> Mapping[str, Any]:
    """Return a mapping from JSON text; empty without a text.

    Raises:
        ConfigError: the text is not a JSON object.
    """
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is a JSON object, and cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} is a JSON object, not {text!r}")
    return value


def _convert(flag: ForeignFlag, name: str, value: str) -> list[str] | None:
    """Return the values here; None if the flag has no effect."""
    if value in flag.values:
        return [flag.values[value]] if flag.values[value] else None
    if flag.target:
        try:
            converted = value if flag.convert is None else flag.convert(value)
            return converted if isinstance(converted, list) else [converted]
        except ValueError:
            raise ConfigError(
                f"{name} {value!r:.100} of {flag.program} cannot be read: see {flag.target}"
            ) from None
    if flag.refusal:
        text = name if flag.is_switch else f"{name} {value!r:.100}"
        raise ConfigError(f"{text} of {flag.program} has no counterpart here: {flag.refusal}")
    return None
