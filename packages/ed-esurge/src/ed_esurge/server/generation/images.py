"""Images in chat requests: content parts to pixel values and placeholder tokens.

An image is a `data:` URL, or a URL of a host in `allowed_media_domains` whose addresses are public
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
from ed_esurge.server.generation.media import (
    IMAGE,
    RECORDING,
    ChatMedia,
    ProcessedMedium,
    media_parts,
)
from ed_esurge.server.generation.requests import ChatMessage, ImagePart
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


class ChatImages(ChatMedia[ImageSource]):
    """Reads the images of chat requests for one model.

    Args:
        names: names of the arrays that the model reads, with `pixel_values` for a vision tower.
        processor: processor of the checkpoint; None = no processor was loaded.
        allowed_domains: hosts from which images are downloaded.
    """

    kind = IMAGE

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
        self.tokens_of_item = set() if processor is None else get_tokens_of_image(processor)
        self.placeholder = "" if processor is None else processor.image_token
        self._decoder = PictureDecoder()

    def start(self) -> None:
        """See `ChatMedia.start`."""
        if self.accepts_images and self.token is not None:
            self._decoder.start()

    async def sources(self, messages: Sequence[ChatMessage]) -> list[ImageSource]:
        """See `ChatMedia.sources`; images of allowed hosts are downloaded."""
        parts: list[tuple[str, ImagePart]] = []
        for part_path, medium in media_parts(messages):
            if not isinstance(medium, ImagePart):
                RECORDING.refuse("this model does not accept audio: send text only", part_path)
            parts.append((part_path, medium))
        if not parts:
            return []
        path, first = parts[0]
        if not self.accepts_images:
            field = "type" if first.image_url is None else "image_url"
            IMAGE.refuse("this model does not accept images: send text only", f"{path}.{field}")
        if self.token is None:
            IMAGE.refuse(
                "this model has no processor for images: load the engine from a checkpoint with a "
                "processor",
                f"{path}.image_url",
            )
        if len(parts) > MAX_IMAGES:
            IMAGE.refuse(
                f"the request has {len(parts)} images, and the limit is {MAX_IMAGES}",
                f"{parts[MAX_IMAGES][0]}.image_url",
            )
        return [await self._source(part, path) for path, part in parts]

    async def _source(self, part: ImagePart, path: str) -> ImageSource:
        if part.image_url is None:
            IMAGE.refuse("is missing", f"{path}.image_url")
        url, param = part.image_url.url, part.content_field(path)
        if url[:5].lower() == "data:":
            return ImageSource(_decode_data_url(url, param), param)
        return ImageSource(await self._download_image(url, param), param)

    async def _download_image(self, url: str, param: str) -> bytes:
        try:
            address = httpx.URL(url)
        except (httpx.InvalidURL, TypeError):
            address = httpx.URL("")
        if address.scheme not in ("http", "https") or not address.host:
            IMAGE.refuse("an image must be a data: URL or an http(s) URL", param)
        if address.host not in self._domains:
            IMAGE.refuse(
                f"the server does not download images from {address.host!r:.100}: send a data: "
                "URL, or start the server with this host in allowed_media_domains",
                param,
            )
        data = bytearray()
        try:
            async with (
                asyncio.timeout(FETCH_SECONDS),
                httpx.AsyncClient(follow_redirects=False, trust_env=False) as client,
                self._opened_stream(client, address, param) as answer,
            ):
                if answer.status_code != 200:
                    IMAGE.refuse(f"the download failed with status {answer.status_code}", param)
                async for chunk in answer.aiter_raw():
                    data += chunk
                    if len(data) > MAX_IMAGE_BYTES:
                        IMAGE.refuse_size(MAX_IMAGE_BYTES, param)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            IMAGE.refuse(f"the download failed ({type(error).__name__})", param)
        return bytes(data)

    @asynccontextmanager
    async def _opened_stream(
        self, client: httpx.AsyncClient, address: httpx.URL, param: str
    ) -> AsyncIterator[httpx.Response]:
        """Request a URL from an address that was checked, so a later answer of the name server
        cannot change the address."""
        port = address.port or {"http": 80, "https": 443}[address.scheme]
        numbers = await resolve_host(address.host, port)
        for number in numbers:
            if not (is_public(number) or number in self._domains):
                IMAGE.refuse(
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

    def process_medium(
        self, source: ImageSource, group: JobGroup | None, *, is_single: bool
    ) -> ProcessedMedium:
        """See `ChatMedia.process_medium`."""
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
        return ProcessedMedium(*processed, source.param)


async def resolve_host(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host."""
    loop = asyncio.get_running_loop()
    address_infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in address_infos]


def _decode_data_url(url: str, param: str) -> bytes:
    """Return the bytes of a `data:` URL."""
    head, _, data = url.partition(",")
    if not head.lower().endswith(";base64"):
        IMAGE.refuse(
            "a data: URL of an image must contain base64: data:image/png;base64,...", param
        )
    return IMAGE.decode_base64(data, MAX_IMAGE_BYTES, param)


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
