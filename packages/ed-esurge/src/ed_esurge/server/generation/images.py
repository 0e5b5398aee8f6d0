"""Images and videos in chat requests: content parts to pixel values and placeholder tokens.

A file is a `data:` URL, or a URL of a host in `allowed_media_domains` whose addresses are public
or in `allowed_media_domains`, too. The limits of bytes and pixels are checked before the pixels are
decoded, in a limited child process (`ed_esurge.pictures`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
from ed_models.modalities.images import (
    ImageTextProcessor,
    get_feature_token,
    get_tokens_of_image,
    process_image,
)

from ed_esurge.children.process import JobGroup
from ed_esurge.pictures.decoder import PictureDecoder, PictureError
from ed_esurge.server.generation.content_parts import AudioPart, ImagePart, VideoPart
from ed_esurge.server.generation.media import (
    IMAGE,
    MEDIUM_KINDS,
    RECORDING,
    VIDEO,
    ChatMedia,
    MediumKind,
    ProcessedMedium,
    media_parts,
)
from ed_esurge.server.generation.requests import ChatMessage
from ed_esurge.server.generation.videos import (
    MAX_VIDEOS,
    VIDEO_LIMITS,
    VIDEO_SECONDS,
    ChatVideos,
    VideoSource,
)
from ed_esurge.server.http.public_addresses import is_public

if TYPE_CHECKING:
    import PIL.Image

#: Limits of one request: number of images, and bytes and pixels of each image.
MAX_IMAGES, MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS = 16, 2**24, 2**24
# Longest side of an image in pixels. The time of an image processor depends on each side.
MAX_SIDE = 2**16
# Time limit of a download in seconds.
FETCH_SECONDS = 10.0


@dataclass(frozen=True)
class ImageSource:
    """An image, and the field of the request.

    Attributes:
        data: the encoded bytes, or the decoded image.
        param: the field of the request for errors.
    """

    data: bytes | PIL.Image.Image
    param: str


_Part = ImagePart | VideoPart
_Source = ImageSource | VideoSource


class ChatImages(ChatMedia[_Source]):
    """Reads the images and videos of chat requests for one model.

    Args:
        names: names of the arrays that the model reads, with `pixel_values` for a vision tower.
        processor: processor of the checkpoint; None = no processor was loaded.
        allowed_domains: hosts from which images and videos are downloaded.
    """

    def __init__(
        self,
        names: Collection[str],
        processor: ImageTextProcessor | None,
        allowed_domains: Collection[str],
    ) -> None:
        self._names, self._processor = names, processor
        self.accepts_images = "pixel_values" in names
        self._domains = frozenset(name.lower() for name in allowed_domains)
        self.token = None if processor is None else get_feature_token(processor)
        self._videos = ChatVideos(names, processor)
        features = {token for token in (self.token, self._videos.token) if token is not None}
        self.feature_tokens, self.tokens_of_item, self.placeholders = features, features, {}
        if processor is not None:
            self.tokens_of_item = features | get_tokens_of_image(processor)
            self.placeholders = {processor.image_token: IMAGE, **self._videos.placeholders}
        self._decoder = PictureDecoder()

    def start(self) -> None:
        """See `ChatMedia.start`."""
        if self.accepts_images and self.token is not None:
            self._decoder.start()

    async def sources(self, messages: Sequence[ChatMessage]) -> list[_Source]:
        """See `ChatMedia.sources`; files of allowed hosts are downloaded."""
        parts: list[tuple[str, _Part]] = []
        for path, medium in media_parts(messages):
            if isinstance(medium, AudioPart):
                RECORDING.refuse("this model does not accept audio: send text only", path)
            parts.append((path, medium))
        self._check_numbers(parts)
        return [await self._source(part, path) for path, part in parts]

    def _check_numbers(self, parts: Sequence[tuple[str, _Part]]) -> None:
        """Check that the model reads the parts, and the number of each kind."""
        numbers = {IMAGE: 0, VIDEO: 0}
        for path, part in parts:
            kind = MEDIUM_KINDS[type(part)]
            field = f"{path}.{kind.field}"
            if not self.accepts_images:
                kind.refuse(
                    f"this model does not accept {kind.noun}s: send text only",
                    f"{path}.type" if part.url is None else field,
                )
            if self.token is None:
                kind.refuse(
                    f"this model has no processor for {kind.noun}s: load the engine from a "
                    "checkpoint with a processor",
                    field,
                )
            if kind is VIDEO and self._videos.token is None:
                VIDEO.refuse("this model does not accept videos: send text and images only", field)
            numbers[kind] += 1
            most = MAX_IMAGES if kind is IMAGE else MAX_VIDEOS
            if numbers[kind] > most:
                count = sum(MEDIUM_KINDS[type(other)] is kind for _, other in parts)
                kind.refuse(f"the request has {count} {kind.noun}s, and the limit is {most}", field)

    async def _source(self, part: _Part, path: str) -> _Source:
        kind = MEDIUM_KINDS[type(part)]
        if part.url is None:
            kind.refuse("is missing", f"{path}.{kind.field}")
        param = part.content_field(path)
        data = await self._read_url(part.url, kind, param)
        return ImageSource(data, param) if kind is IMAGE else VideoSource(data, param)

    async def _read_url(self, url: str, kind: MediumKind, param: str) -> bytes:
        """Return the bytes of a `data:` URL, or download a file of an allowed host."""
        most, seconds = MAX_IMAGE_BYTES, FETCH_SECONDS
        if kind is VIDEO:
            most, seconds = VIDEO_LIMITS.bytes, VIDEO_SECONDS
        if url[:5].lower() == "data:":
            return kind.decode_data_url(url, most, param)
        try:
            address = httpx.URL(url)
        except (httpx.InvalidURL, TypeError):
            address = httpx.URL("")
        if address.scheme not in ("http", "https") or not address.host:
            article = "an" if kind is IMAGE else "a"
            kind.refuse(f"{article} {kind.noun} must be a data: URL or an http(s) URL", param)
        if address.host not in self._domains:
            kind.refuse(
                f"the server does not download {kind.noun}s from {address.host!r:.100}: send a "
                "data: URL, or start the server with this host in allowed_media_domains",
                param,
            )
        data = bytearray()
        try:
            async with (
                asyncio.timeout(seconds),
                httpx.AsyncClient(follow_redirects=False, trust_env=False) as client,
                self._opened_stream(client, address, kind, param) as answer,
            ):
                if answer.status_code != 200:
                    kind.refuse(f"the download failed with status {answer.status_code}", param)
                async for chunk in answer.aiter_raw():
                    data += chunk
                    if len(data) > most:
                        kind.refuse_size(most, param)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            kind.refuse(f"the download failed ({type(error).__name__})", param)
        return bytes(data)

    @asynccontextmanager
    async def _opened_stream(
        self, client: httpx.AsyncClient, address: httpx.URL, kind: MediumKind, param: str
    ) -> AsyncIterator[httpx.Response]:
        """Request a URL from an address that was checked, so a later answer of the name server
        cannot change the address."""
        port = address.port or {"http": 80, "https": 443}[address.scheme]
        numbers = await resolve_host(address.host, port)
        for number in numbers:
            if not (is_public(number) or number in self._domains):
                kind.refuse(
                    f"the host {address.host!r:.100} has an address that is not public: send a "
                    "data: URL, or start the server with the address in allowed_media_domains, too",
                    param,
                )
        async with client.stream(
            "GET",
            address.copy_with(host=numbers[0]),
            headers={"Host": address.netloc.decode("ascii"), "Accept-Encoding": "identity"},
            extensions={"sni_hostname": address.host},
        ) as answer:
            yield answer

    def get_kind(self, source: _Source) -> MediumKind:
        """See `ChatMedia.get_kind`."""
        return IMAGE if isinstance(source, ImageSource) else VIDEO

    def process_medium(
        self, source: _Source, group: JobGroup | None, *, is_single: bool
    ) -> ProcessedMedium:
        """See `ChatMedia.process_medium`."""
        if isinstance(source, VideoSource):
            return self._videos.process(source, group)
        processor = self._processor
        assert processor is not None, "`sources` has checked the processor"
        data = source.data
        try:
            if isinstance(data, bytes):
                image = self._decoder.read(data, MAX_IMAGE_PIXELS, group)
            else:
                image = data.convert("RGB")
        except PictureError as error:
            IMAGE.refuse(str(error), source.param)
        _check_shape(image, getattr(processor, "image_processor", None), source.param)
        try:
            processed = process_image(processor, image, self._names, is_single=is_single)
        except Exception as error:  # processors may raise any exception for an unusual size
            IMAGE.refuse(f"the image cannot be processed: {error}", source.param)
        return ProcessedMedium(*processed, source.param, IMAGE)


async def resolve_host(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host."""
    loop = asyncio.get_running_loop()
    address_infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in address_infos]


def _check_shape(image: PIL.Image.Image, processor: object, param: str) -> None:
    """Check that an image processor does not enlarge a narrow image without a limit.

    A processor such as CLIP's enlarges the shortest side to a fixed length before it crops.

    Raises:
        APIError: 400.
    """
    short, long = sorted(image.size)
    if long > MAX_SIDE:
        IMAGE.refuse(f"the image has a side of {long} pixels, and the limit is {MAX_SIDE}", param)
    size = getattr(processor, "size", None)
    if size is None:
        return
    edge = size.get("shortest_edge")
    if not edge or size.get("longest_edge"):
        return
    most = max(1, 2 * MAX_IMAGE_PIXELS // edge**2)
    if long > most * short:
        IMAGE.refuse(
            f"the image has {image.width} x {image.height} pixels, and the longer side may be at "
            f"most {most} times the shorter side: crop the image",
            param,
        )
