"""Formats of tool calls and reasoning: their description and their selection.

The formats are the entries of `replies.tool_formats` and `replies.reasoning_formats`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from ed_infra.errors import ConfigError, did_you_mean

Syntax = Literal["json", "keyed", "headed", "tagged", "elements", "python", "braces"]
Sign = str | tuple[str, ...]
"""A text that identifies a format, or several texts that identify it together."""


@dataclass(frozen=True)
class ToolFormat:
    """Format of tool calls.

    Attributes:
        opens: markers that begin a section of calls.
        starts: beginnings of a reply that is a section without a marker.
        closes: markers that may end a section.
        begins: marker that begins each call within a section, if any. A model may omit the marker
            of the section before it.
        separators: texts that may separate two calls.
        syntax: `json`: objects with a name and arguments. `keyed`: objects whose only key is the
            name. `headed`: a name, then the arguments as JSON. `tagged`: a name, then each
            argument between tags. `elements`: a name, then each argument as nested XML elements.
            `python`: `f(a=1)`. `braces`: `f{a:1}`.
        headers: whether a reply consists of messages with headers, see `replies.harmony`.
        ends_thoughts: whether a call ends thoughts that are still open. Otherwise thoughts end at
            their own marker, and a call within thoughts is a quotation.
        name_keys: keys of the name in `json`.
        name_ends: texts that end the name of a `headed` or `tagged` call. The beginning of the
            arguments (`{`, or `key_open`) is not consumed.
        name: pattern of the head, with the group `name` and an optional group `id`.
        ends: texts that end a call.
        key_open, key_close, value_open, value_close: tags around an argument. In `elements`,
            `value_close` is the beginning of the closing tag, before the name.
        key: pattern of the text between the first two tags, with the group `key`, and an optional
            group `string`, which is `true` if the value is a string.
        padding: white space that belongs to the tags and not to the value.
        id_length: number of letters and digits of a call's id, if the template requires a length.
        drops: markers without a meaning for the user.
        signs: texts in a chat template or vocabulary. Each identifies the format.
    """

    opens: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()
    separators: tuple[str, ...] = (",", ";")
    syntax: Syntax = "json"
    name_keys: tuple[str, ...] = ("name",)
    name_ends: tuple[str, ...] = ()
    name: str = r"(?P<name>[^\s<>\[\]{}()\"]+)"
    ends: tuple[str, ...] = ()
    key_open: str = ""
    key_close: str = ""
    key: str = r"\s*(?P<key>.*?)\s*"
    value_open: str = ""
    value_close: str = ""
    padding: str = ""
    id_length: int = 0
    drops: tuple[str, ...] = ()
    signs: tuple[Sign, ...] = ()
    headers: bool = False
    ends_thoughts: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Every text that has a meaning in this format."""
        return tuple(
            filter(
                None,
                (
                    *(*self.opens, *self.closes, *self.begins, *self.name_ends, *self.ends),
                    *(self.key_open, self.key_close, self.value_open, self.value_close),
                    *self.drops,
                ),
            )
        )


@dataclass(frozen=True)
class ReasoningFormat:
    """Format of reasoning.

    Attributes:
        opens, closes: markers around the reasoning. A reply begins with reasoning if its prompt
            ends with the first of `opens`.
        drops: markers without a meaning for the user.
        signs, headers: see `ToolFormat`.
        always: whether a reply of a model that is known to think begins with thoughts, even if
            neither the prompt nor the reply contains the opening marker.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    drops: tuple[str, ...] = ()
    signs: tuple[Sign, ...] = ()
    headers: bool = False
    always: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Every text that has a meaning in this format."""
        return (*self.opens, *self.closes, *self.drops)


FormatT = TypeVar("FormatT", ToolFormat, ReasoningFormat)


def get_format(table: Mapping[str, FormatT], name: str, option: str) -> FormatT:
    """Return an entry of a table.

    Raises:
        ConfigError: the table has no such entry; the message lists the names.
    """
    if name not in table:
        raise ConfigError(
            f"{option} {name!r} is not known{did_you_mean(name, tuple(table)) or ''}; there are "
            f"{', '.join(sorted(table))}, `auto` looks at the chat template, and `none` reads none"
        )
    return table[name]


def detect(
    table: Mapping[str, FormatT],
    template: str,
    vocabulary: Collection[str] = (),
) -> str | None:
    """Return the first format with signs in a chat template, or else in a vocabulary."""
    for text in (template, vocabulary):
        for name, entry in table.items():
            for sign in entry.signs:
                if all(part in text for part in ((sign,) if isinstance(sign, str) else sign)):
                    return name
    return None
