"""The conversion of a file of another program: the values so far, and the rules for its keys.

A rule is an entry of a table: the place in a run file, a function that converts the value, and a
sentence. The pages of docs/migrate are generated from the same tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ed_infra.errors import ConfigError


@dataclass
class Conversion:
    """A run file in the making.

    Attributes:
        source: keys of the other program and their values, without those that are None.
        program: name of the other program.
        folder: folder of the file, to which its paths are relative.
        devices: number of devices of the run, for sizes of batches per device.
        method: the value of `trainer.trainer_type`.
        values: path of a run file -> value.
        origins: path -> the keys from which the value comes, or another remark.
        omitted: key -> why the key is not needed.
        changes: key -> what changes the result, and what to do.
    """

    source: dict[str, object]
    program: str
    folder: Path = Path()
    devices: int = 1
    method: str = "sft"
    values: dict[str, object] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    omitted: dict[str, str] = field(default_factory=dict)
    changes: dict[str, str] = field(default_factory=dict)

    def put(self, path: str, value: object, origin: str = "") -> None:
        """Set a value of the run file."""
        self.values[path] = value
        if origin:
            self.origins[path] = origin

    def put_default(self, path: str, value: object) -> None:
        """Set a value that the other program has by default, unless the file sets it."""
        if path not in self.values:
            self.put(path, value, f"default of {self.program}")

    def read_flag(self, key: str) -> bool:
        """Return whether a key of the source is true."""
        return is_true(self.source.get(key))

    def read_number(self, key: str, default: float) -> float:
        """Return a number of the source.

        Raises:
            ConfigError: the value is no number.
        """
        value = self.source.get(key, default)
        try:
            return float(str(value))
        except ValueError:
            raise ConfigError(f"{key}: {value!r} is no number") from None

    def read_count(self, key: str, default: int) -> int:
        """Return a whole number of the source.

        Raises:
            ConfigError: the value is no whole number above 0.
        """
        number = self.read_number(key, default)
        if number < 1 or number != int(number):
            raise ConfigError(f"{key}: {number:g} is no whole number above 0")
        return int(number)


#: Begin of an advice that names a section of a run file.
_PATH = re.compile(
    r"(trainer|mixture|model|lora|loader|quantization|base_config|esurge|sharding)[.:]"
)
#: Converts the value of a key: `(conversion, key, value)`.
ConvertValue = Callable[[Conversion, str, object], None]


@dataclass(frozen=True)
class KeyRule:
    """What becomes of a key of another program.

    Attributes:
        place: the place in a run file, or "omit it: " and the reason.
        convert: converts the value.
    """

    place: str
    convert: ConvertValue


def is_true(value: object) -> bool:
    """Return whether a value of YAML means true."""
    return value is True or (isinstance(value, str) and value.lower() in ("true", "yes", "on"))


def copy_to(path: str) -> KeyRule:
    """Return the rule of a key with the same value at another place."""

    def convert(conversion: Conversion, key: str, value: object) -> None:
        conversion.put(path, parse_yaml_number(value), key)

    return KeyRule(path, convert)


def translate_to(path: str, names: Mapping[str, object]) -> KeyRule:
    """Return the rule of a key whose values have other names here; None: the default."""

    def convert(conversion: Conversion, key: str, value: object) -> None:
        name = str(value).lower()
        if name not in names:
            conversion.changes[key] = f"{value} has no counterpart; set {path} to another value"
        elif names[name] is not None:
            conversion.put(path, names[name], f"{key} {value}")

    return KeyRule(path, convert)


def omit(reason: str) -> KeyRule:
    """Return the rule of a key without effect on the result."""

    def convert(conversion: Conversion, key: str, value: object) -> None:
        conversion.omitted[key] = reason

    return KeyRule(f"omit it: {reason}", convert)


def lose(advice: str, *neutral: object) -> KeyRule:
    """Return the rule of a key that changes the result, except with a neutral value."""

    def convert(conversion: Conversion, key: str, value: object) -> None:
        if value in (False, "", *neutral) or value == [] or value == {}:
            conversion.omitted[key] = f"{value!r} changes nothing"
        else:
            conversion.changes[key] = advice

    return KeyRule(advice if _PATH.match(advice) else f"omit it: {advice}", convert)


def read_later(place: str) -> KeyRule:
    """Return the rule of a key that the last step of the program's conversion reads."""

    def convert(conversion: Conversion, key: str, value: object) -> None:
        return None

    return KeyRule(place, convert)


def parse_yaml_number(value: object) -> object:
    """Return the number of a text such as `2e-4`, which YAML reads as a text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def split_names(value: object) -> list[str]:
    """Return the names of a list, or of a text with commas."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return [str(name) for name in value] if isinstance(value, list | tuple) else [str(value)]
