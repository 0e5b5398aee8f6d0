"""Images and recordings in chat requests: what both have in common."""

from __future__ import annotations

import base64
import binascii
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np

from ed_esurge.children.process import JobGroup
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


class ChatMedia(ABC, Generic[MediumT]):
    """Reads the images or the recordings of chat requests for one model.

    Attributes:
        accepts_images: whether messages may contain images.
        kind: the kind of the media.
        placeholder: text that a chat template writes for a medium.
        token: the placeholder token of a feature; None = no processor was loaded.
        tokens_of_item: the tokens from the first to the last feature of an item.
    """

    accepts_images = False
    kind: MediumKind
    placeholder: str
    token: int | None
    tokens_of_item: Collection[int]

    @abstractmethod
    def start(self) -> None:
        """Start the process that decodes media, if the model accepts the media."""

    @abstractmethod
    async def sources(self, messages: Sequence[ChatMessage]) -> list[MediumT]:
        """Return the encoded media of a conversation in order.

        Raises:
            APIError: 400, the model does not accept the media, there are too many of them, or a
                medium cannot be read.
        """

    @abstractmethod
    def process_medium(
        self, source: MediumT, group: JobGroup | None, *, is_single: bool
    ) -> ProcessedMedium:
        """Return a medium in the form that the model reads.

        Args:
            source: the encoded medium.
            group: the jobs that are cancelled together.
            is_single: whether the conversation has no other medium.

        Raises:
            APIError: 400, the medium is invalid.
        """

    def expand_placeholders(
        self, text: str, sources: Sequence[MediumT], group: JobGroup | None = None
    ) -> tuple[str, list[ProcessedMedium]]:
        """Process media, and replace the placeholder of each by the tokens of its features.

        Args:
            text: the rendered conversation, with one placeholder per medium. The texts of users
                contain no placeholders, see `ChatTemplate.render`.
            sources: at least one medium, see `sources`.
            group: the jobs that are cancelled together.

        Raises:
            APIError: 400, a medium is invalid, or the template has no placeholder for it.
        """
        first, *segments = text.split(self.placeholder)
        if len(segments) != len(sources):
            self.kind.refuse(
                f"the chat template of this model does not support {self.kind.noun}s in this "
                "conversation",
                sources[0].param,
            )
        parts, media = [first], list[ProcessedMedium]()
        for source, following in zip(sources, segments, strict=True):
            media.append(self.process_medium(source, group, is_single=len(sources) == 1))
            parts += [media[-1].text, following]
        return "".join(parts), media

    def build_encoder_inputs(
        self, tokens: Sequence[int], media: Sequence[ProcessedMedium]
    ) -> tuple[EncoderInput, ...]:
        """Return the encoder inputs of the media in a prompt.

        Args:
            tokens: token ids of the expanded text.
            media: the media in order.

        Raises:
            APIError: 400, the tokens of a medium are not those of its features.
        """
        places = iter([place for place, token in enumerate(tokens) if token == self.token])
        inputs = []
        for medium in media:
            for arrays in medium.tiles:
                tile_places = list(islice(places, medium.length))
                between = tokens[tile_places[0] : tile_places[-1] + 1] if tile_places else ()
                if len(tile_places) != medium.length or not {*between} <= {*self.tokens_of_item}:
                    self.kind.refuse(
                        f"the tokenizer does not keep the tokens of this {self.kind.noun}",
                        medium.param,
                    )
                inputs.append(EncoderInput.at(arrays, tile_places))
        return tuple(inputs)
