"""Images and recordings in chat requests: what both have in common."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np

from ed_esurge.core.commands import EncoderInput
from ed_esurge.server.generation.requests import AudioPart, ChatMessage, ImagePart
from ed_esurge.server.http.errors import APIError


class SentMedium(Protocol):
    """A medium of a request."""

    @property
    def param(self) -> str:
        """The field of the request."""
        ...


MediumT = TypeVar("MediumT", bound=SentMedium)


@dataclass(frozen=True)
class ProcessedMedium:
    """An image or a recording in the form that the model reads.

    Attributes:
        tiles: the arrays of each tile of an image, or of each part of a recording.
        text: the text of the tokens of the medium.
        length: number of features of a tile.
        param: field of the request for errors.
    """

    tiles: list[dict[str, np.ndarray]]
    text: str
    length: int
    param: str


class MediumKind(NamedTuple):
    """The errors of one kind of media.

    Attributes:
        noun: the kind in messages.
        code: code of the errors.
    """

    noun: str
    code: str

    def refuse(self, message: str, param: str) -> NoReturn:
        """Raise `APIError` 400 for a field of the request."""
        raise APIError(f"{param}: {message}", param=param, code=self.code)

    def refuse_size(self, most: int, param: str) -> NoReturn:
        """Raise `APIError` 400 for a medium of more than `most` bytes."""
        self.refuse(f"the {self.noun} is larger than {most} bytes, the limit of this server", param)

    def decode_base64(self, text: str, most: int, param: str) -> bytes:
        """Return the bytes of base64 text.

        Raises:
            APIError: 400, there are more than `most` bytes, or the text is invalid.
        """
        if len(text) * 3 // 4 > most:
            self.refuse_size(most, param)
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            self.refuse(f"the {self.noun} is not valid base64 text", param)


IMAGE = MediumKind("image", "invalid_image")
RECORDING = MediumKind("recording", "invalid_audio")


def media_parts(messages: Sequence[ChatMessage]) -> Iterator[tuple[str, ImagePart | AudioPart]]:
    """Yield the images and recordings of a conversation with their fields."""
    for index, message in enumerate(messages):
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImagePart | AudioPart):
                yield part.field or f"messages[{index}].content[{place}]", part


def expand_placeholders(
    text: str,
    placeholder: str,
    sources: Sequence[MediumT],
    process: Callable[[MediumT], ProcessedMedium],
    kind: MediumKind,
) -> tuple[str, list[ProcessedMedium]]:
    """Process media, and replace the placeholder of each by the tokens of its features.

    Args:
        text: the rendered conversation, with one placeholder per medium.
        sources: at least one medium.
        kind: the kind of the media.

    Raises:
        APIError: 400, a medium is invalid, or the template has no placeholder for it.
    """
    first, *segments = text.split(placeholder)
    if len(segments) != len(sources):
        kind.refuse(
            f"the chat template of this model does not support {kind.noun}s in this conversation",
            sources[0].param,
        )
    parts, media = [first], list[ProcessedMedium]()
    for source, following in zip(sources, segments, strict=True):
        media.append(process(source))
        parts += [media[-1].text, following]
    return "".join(parts), media


def build_encoder_inputs(
    tokens: Sequence[int],
    media: Sequence[ProcessedMedium],
    token: int,
    allowed: Collection[int],
    kind: MediumKind,
) -> tuple[EncoderInput, ...]:
    """Return the encoder inputs of images or recordings in a prompt.

    Args:
        tokens: token ids of the expanded text.
        media: the media in order.
        token: the placeholder token of a feature.
        allowed: tokens from the first to the last feature of an item.
        kind: the kind of the media.

    Raises:
        APIError: 400, the tokens of a medium are not those of its features.
    """
    places = iter([place for place, token_id in enumerate(tokens) if token_id == token])
    inputs = []
    for medium in media:
        for arrays in medium.tiles:
            tile_places = list(islice(places, medium.length))
            between = set(tokens[tile_places[0] : tile_places[-1] + 1]) if tile_places else set()
            if len(tile_places) != medium.length or not between <= {*allowed}:
                kind.refuse(
                    f"the tokenizer does not keep the tokens of this {kind.noun}", medium.param
                )
            inputs.append(EncoderInput.at(arrays, tile_places))
    return tuple(inputs)
