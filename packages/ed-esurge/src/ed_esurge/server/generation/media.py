"""Images, videos and recordings in chat requests: what they have in common."""

from __future__ import annotations

import base64
import binascii
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Generic, NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np

from ed_esurge.children.process import JobGroup
from ed_esurge.core.commands import EncoderInput
from ed_esurge.server.generation.content_parts import (
    AudioPart,
    ImagePart,
    MediumPart,
    VideoPart,
)
from ed_esurge.server.generation.requests import ChatMessage
from ed_esurge.server.http.errors import APIError


class SentMedium(Protocol):
    """A medium of a request."""

    @property
    def param(self) -> str:
        """The field of the request."""
        ...


MediumT = TypeVar("MediumT", bound=SentMedium)


class MediumKind(NamedTuple):
    """The errors of one kind of media.

    Attributes:
        noun: the kind in messages.
        code: code of the errors.
        field: field of a part with the medium.
        example: type of a file.
    """

    noun: str
    code: str
    field: str
    example: str

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

    def decode_data_url(self, url: str, most: int, param: str) -> bytes:
        """Return the bytes of a `data:` URL. Raises APIError: see `decode_base64`."""
        head, _, data = url.partition(",")
        if not head.lower().endswith(";base64"):
            self.refuse(f"a data: URL must contain base64: data:{self.example};base64,...", param)
        return self.decode_base64(data, most, param)


IMAGE = MediumKind("image", "invalid_image", "image_url", "image/png")
VIDEO = MediumKind("video", "invalid_video", "video_url", "video/mp4")
RECORDING = MediumKind("recording", "invalid_audio", "input_audio", "audio/wav")
#: Class of parts -> the kind of their media.
MEDIUM_KINDS: Mapping[type[MediumPart], MediumKind] = {
    ImagePart: IMAGE,
    VideoPart: VIDEO,
    AudioPart: RECORDING,
}


@dataclass(frozen=True)
class ProcessedMedium:
    """An image, a video or a recording in the form that the model reads.

    Attributes:
        tiles: the arrays of each tile of an image, of each frame of a video, or of each part of a
            recording.
        text: the text of the tokens of the medium.
        length: number of features of a tile.
        param: field of the request for errors.
        kind: the kind of the medium.
    """

    tiles: list[dict[str, np.ndarray]]
    text: str
    length: int
    param: str
    kind: MediumKind


def media_parts(
    messages: Sequence[ChatMessage],
) -> Iterator[tuple[str, ImagePart | VideoPart | AudioPart]]:
    """Yield the images, videos and recordings of a conversation with their fields."""
    for index, message in enumerate(messages):
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImagePart | VideoPart | AudioPart):
                yield part.field or f"messages[{index}].content[{place}]", part


class ChatMedia(ABC, Generic[MediumT]):
    """Reads the images and videos, or the recordings, of chat requests for one model.

    Attributes:
        accepts_images: whether messages may contain images.
        placeholders: text that a chat template writes for a medium -> the kind of the medium.
        feature_tokens: the placeholder tokens of features.
        tokens_of_item: the tokens from the first to the last feature of an item.
    """

    accepts_images = False
    placeholders: Mapping[str, MediumKind]
    feature_tokens: Collection[int]
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
    def get_kind(self, source: MediumT) -> MediumKind:
        """Return the kind of a medium."""

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
        pattern = "|".join(map(re.escape, self.placeholders))
        first, *pieces = re.split(f"({pattern})", text)
        kinds, segments = [self.placeholders[mark] for mark in pieces[::2]], pieces[1::2]
        if kinds != [self.get_kind(source) for source in sources]:
            # The first medium without a place; if there is none, the template writes more places.
            pairs = zip_longest(sources, kinds[: len(sources)])
            missing = (source for source, kind in pairs if self.get_kind(source) != kind)
            source = next(missing, sources[0])
            kind = self.get_kind(source)
            kind.refuse(
                f"the chat template of this model does not support {kind.noun}s in this "
                "conversation",
                source.param,
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
        features = {*self.feature_tokens}
        places = iter([place for place, token in enumerate(tokens) if token in features])
        inputs = []
        for medium in media:
            for arrays in medium.tiles:
                tile_places = list(islice(places, medium.length))
                between = tokens[tile_places[0] : tile_places[-1] + 1] if tile_places else ()
                if len(tile_places) != medium.length or not {*between} <= {*self.tokens_of_item}:
                    medium.kind.refuse(
                        f"the tokenizer does not keep the tokens of this {medium.kind.noun}",
                        medium.param,
                    )
                inputs.append(EncoderInput.at(arrays, tile_places))
        return tuple(inputs)
