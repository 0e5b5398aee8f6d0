"""The parts of chat messages that are images or recordings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from ed_data.errors import DataError
from ed_data.rows.media_files import decode_base64, decode_data_url
from ed_data.schema import Content, Message

SourceT = TypeVar("SourceT")
#: Content of a part that is base64 text.
_BASE64 = "base64"


class MediaParts(NamedTuple):
    """The parts of one kind of media.

    Attributes:
        name: the kind, which is also the type of a part in chat templates.
        noun: the kind in messages.
        types: types of parts, of transformers and of OpenAI.
        keys: keys of a part that contain the medium.
        option: option of an inform that names the field with the media of a row.
    """

    name: str
    noun: str
    types: tuple[str, ...]
    keys: tuple[str, ...]
    option: str

    def of(self, fields: dict[str, Content]) -> list[dict[str, Any]]:
        """Return the parts of all fields in order."""
        return [part for content in fields.values() for part in self._iterate_parts(content)]

    def sources(
        self,
        parts: Sequence[dict[str, Any]],
        listed: Sequence[SourceT],
        read: Callable[[object], SourceT],
        location: str,
        field: str,
        *,
        named: bool,
    ) -> list[SourceT]:
        """Return the medium of each part: its own, or the next medium of the row's field.

        Args:
            parts: see `of`; at least one.
            listed: the media in the field of the row.
            read: returns the medium of a path, bytes or another value of a part.
            location: the row, for messages.
            field: name of the field.
            named: whether `option` names the field.

        Raises:
            DataError: a medium is missing, is left over, or has invalid base64 text.
        """
        media, remaining = list[SourceT](), iter(listed)
        count = f"the row has {len(listed)} {self.noun}s in {field!r}"
        for number, part in enumerate(parts, 1):
            part_value = self._value(part, location)
            source = next(remaining, None) if part_value is None else read(part_value)
            if source is None:
                raise DataError(
                    f"{location}: {self.noun} part {number} of the messages has no {self.noun}: "
                    "the "
                    f"part has none of the keys {', '.join(self.keys)}, and {count}; add the "
                    f"{self.noun}, or remove the part",
                    (self.option,) if named else (),
                )
            media.append(source)
        unused_count = sum(1 for _ in remaining)
        if unused_count:
            raise DataError(
                f"{location}: {count}, but {unused_count} of them have no {self.noun} part; add "
                f'{{"type": "{self.name}"}} to the content of a message, or remove the '
                f"{self.noun}s"
            )
        return media

    def simplify_parts(self, fields: dict[str, Content]) -> dict[str, Content]:
        """Return the fields with parts `{"type": name}`, as chat templates expect."""
        return {field: self._plain_content(content) for field, content in fields.items()}

    def _iterate_parts(self, content: Content) -> Iterator[dict[str, Any]]:
        for message in content:
            parts = message.get("content") if isinstance(message, dict) else None
            if isinstance(parts, list):
                yield from (p for p in parts if isinstance(p, dict) and p.get("type") in self.types)

    def _plain_content(self, content: Content) -> Content:
        messages: list[Message] = []
        for message in content:
            if not isinstance(message, dict):
                return content
            parts = message.get("content")
            if isinstance(parts, list):
                message = {**message, "content": [self._plain_part(part) for part in parts]}
            messages.append(message)
        return messages

    def _plain_part(self, part: object) -> object:
        if not isinstance(part, dict):
            return part
        if part.get("type") in self.types:
            return {"type": self.name}
        # A table adds a null for each key of the other parts.
        return {key: value for key, value in part.items() if value is not None}

    def _value(self, part: dict[str, Any], location: str) -> object:
        """Return the content of a part: a path, bytes or another value; None = no content."""
        key = next((key for key in self.keys if part.get(key) is not None), None)
        if key is None:
            return None
        value = part[key]
        if isinstance(value, dict) and isinstance(value.get("url"), str):
            value = value["url"]
        elif isinstance(value, dict) and isinstance(value.get("data"), str):
            key, value = _BASE64, value["data"]
        if not isinstance(value, str):
            return value
        noun = f"an {self.name} part"
        if value[:5].lower() == "data:":
            return decode_data_url(value, location, noun)
        return value if key != _BASE64 else decode_base64(value, location, noun, "base64 text")
