"""Images in chat requests: content parts to pixel values and placeholder tokens.

An image is a `data:` URL, or a URL of a host in `allowed_media_domains`. The limits of bytes and
pixels are checked before the pixels are decoded.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol
from urllib.parse import urlsplit

import httpx
import numpy as np

from ed_esurge.core.commands import EncoderInput
from ed_esurge.server.generation.requests import ChatMessage, ImagePart
from ed_esurge.server.http.errors import APIError

if TYPE_CHECKING:
    import PIL.Image

#: Limits of one request: number of images, and bytes and pixels of each image.
MAX_IMAGES, MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS = 16, 2**24, 2**24
# Formats whose decoders are enabled, and the time limit of a download in seconds.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
FETCH_SECONDS = 10.0
#: Name of the grid of an image in the output of a processor that packs patches.
GRID = "image_grid_thw"


class ImageTokenCounts(Protocol):
    """Numbers of placeholder tokens and of arrays of each image."""

    num_image_tokens: list[int]
    num_image_patches: list[int]


class TokenLookup(Protocol):
    """The part of a tokenizer that finds the placeholder token."""

    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...


class ImageTextProcessor(Protocol):
    """The processor of a vision-language checkpoint (`transformers.AutoProcessor`)."""

    image_processor: Callable[..., Mapping[str, Sequence[np.ndarray]]]
    tokenizer: TokenLookup

    def _get_num_multimodal_tokens(self, image_sizes: list[list[int]]) -> ImageTokenCounts: ...


@dataclass(frozen=True)
class _Source:
    """The encoded bytes of an image, and the field of the request."""

    data: bytes
    param: str


class ChatImages:
    """Reads the images of chat requests for one model.

    Args:
        accepts_images: whether the model has a vision tower.
        processor: processor of the checkpoint; None = no processor was loaded.
        allowed_domains: hosts from which images are downloaded.
    """

    def __init__(
        self,
        accepts_images: bool,
        processor: ImageTextProcessor | None,
        allowed_domains: Collection[str],
    ) -> None:
        self._accepts, self._processor = accepts_images, processor
        self._domains = frozenset(name.lower() for name in allowed_domains)
        self._token = None if processor is None else _image_token(processor)

    async def sources(self, messages: Sequence[ChatMessage]) -> list[_Source]:
        """Return the encoded images of a conversation in order.

        Raises:
            APIError: 400, the model does not accept images, there are too many images, or an image
                cannot be downloaded.
        """
        parts = [
            (f"messages[{index}].content[{place}]", part)
            for index, message in enumerate(messages)
            if isinstance(message.content, list)
            for place, part in enumerate(message.content)
            if isinstance(part, ImagePart)
        ]
        if not parts:
            return []
        path, first = parts[0]
        if not self._accepts:
            field = "type" if first.image_url is None else "image_url"
            _refuse("this model does not accept images: send text only", f"{path}.{field}")
        if self._token is None:
            _refuse(
                "this model has no processor for images: load the engine from a checkpoint with a "
                "processor",
                f"{path}.image_url",
            )
        if len(parts) > MAX_IMAGES:
            _refuse(
                f"the request has {len(parts)} images, and the limit is {MAX_IMAGES}",
                f"{parts[MAX_IMAGES][0]}.image_url",
            )
        return [await self._source(part, f"{path}.image_url") for path, part in parts]

    async def _source(self, part: ImagePart, param: str) -> _Source:
        if part.image_url is None:
            _refuse("is missing", param)
        url = part.image_url.url
        if url[:5].lower() == "data:":
            return _Source(_decoded(url, param), f"{param}.url")
        return _Source(await self._downloaded(url, f"{param}.url"), f"{param}.url")

    async def _downloaded(self, url: str, param: str) -> bytes:
        try:
            parts = urlsplit(url)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            _refuse("an image must be a data: URL or an http(s) URL", param)
        if parts.hostname not in self._domains:
            _refuse(
                f"the server does not download images from {parts.hostname!r:.100}: send a data: "
                "URL, or start the server with this host in allowed_media_domains",
                param,
            )
        data = bytearray()
        try:
            async with (
                asyncio.timeout(FETCH_SECONDS),
                httpx.AsyncClient(follow_redirects=False, trust_env=False) as client,
                client.stream("GET", url) as answer,
            ):
                if answer.status_code != 200:
                    _refuse(f"the download failed with status {answer.status_code}", param)
                async for chunk in answer.aiter_bytes():
                    data += chunk
                    if len(data) > MAX_IMAGE_BYTES:
                        _refuse_size(param)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            _refuse(f"the download failed ({type(error).__name__})", param)
        return bytes(data)

    def encode(
        self, tokens: Sequence[int], sources: Sequence[_Source]
    ) -> tuple[list[int], tuple[EncoderInput, ...]]:
        """Process the images, and repeat each placeholder token for the features of its image.

        Args:
            tokens: token ids of the rendered conversation, with one placeholder per image.
            sources: at least one image, see `sources`.

        Raises:
            APIError: 400, an image is invalid, or the template has no placeholder for it.
        """
        processor = self._processor
        assert processor is not None, "`sources` has checked the processor"
        if tokens.count(self._token) != len(sources):
            _refuse(
                "the chat template of this model does not support images in this conversation",
                sources[0].param,
            )
        remaining = iter(sources)
        expanded: list[int] = []
        inputs = []
        for token in tokens:
            if token != self._token:
                expanded.append(token)
                continue
            arrays, count = _processed(processor, next(remaining))
            inputs.append(EncoderInput.of(arrays, start=len(expanded), length=count))
            expanded += [token] * count
        return expanded, tuple(inputs)


def _image_token(processor: ImageTextProcessor) -> int | None:
    token = getattr(processor, "image_token_id", None)
    if token is None and isinstance(text := getattr(processor, "image_token", None), str):
        token = processor.tokenizer.convert_tokens_to_ids(text)
    return token if isinstance(token, int) else None


def _decoded(url: str, param: str) -> bytes:
    """Return the bytes of a `data:` URL."""
    head, _, data = url.partition(",")
    if not head.lower().endswith(";base64"):
        _refuse("a data: URL of an image must contain base64: data:image/png;base64,...", param)
    if len(data) * 3 // 4 > MAX_IMAGE_BYTES:
        _refuse_size(param)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        _refuse("the data: URL does not contain valid base64", param)


def _processed(processor: ImageTextProcessor, source: _Source) -> tuple[dict[str, np.ndarray], int]:
    """Return the arrays of an image, and the number of its features.

    The arrays are `pixel_values` [c, h, w], or packed patches [p, f] with `image_grid_thw` [3].
    """
    image = opened(source.data, source.param)
    try:
        counts = processor._get_num_multimodal_tokens(image_sizes=[[image.height, image.width]])
        output = processor.image_processor(images=[image], return_tensors="np")
    except Exception as error:  # processors may raise any exception for an unusual size
        _refuse(f"the image cannot be processed: {error}", source.param)
    (features,) = counts.num_image_tokens
    if GRID in output:
        pixels, (grid,) = (np.asarray(output[name]) for name in ("pixel_values", GRID))
        arrays = {"pixel_values": pixels.astype(np.float32), GRID: grid.astype(np.int32)}
        return arrays, int(features)
    if counts.num_image_patches != [1]:
        _refuse("this model splits the image into several images: send a smaller one", source.param)
    return {"pixel_values": np.asarray(output["pixel_values"][0], np.float32)}, int(features)


def opened(data: bytes, param: str) -> PIL.Image.Image:
    """Return the RGB image in an encoded image. Check the number of pixels before decoding.

    Args:
        param: field of the request for errors.

    Raises:
        APIError: 400, the format is unknown, or the image is too large or damaged.
    """
    from PIL import Image, ImageOps

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height <= MAX_IMAGE_PIXELS:
            return ImageOps.exif_transpose(image).convert("RGB")
        size = f"{image.width} x {image.height}"
    except Image.DecompressionBombError:
        size = "too many"
    except Exception:  # decoders raise many types of exceptions for damaged data
        _refuse(f"the image cannot be decoded: send {', '.join(FORMATS)}", param)
    _refuse(f"the image has {size} pixels, and the limit is {MAX_IMAGE_PIXELS} pixels", param)


def _refuse(message: str, param: str) -> NoReturn:
    raise APIError(f"{param}: {message}", param=param, code="invalid_image")


def _refuse_size(param: str) -> NoReturn:
    _refuse(f"the image is larger than {MAX_IMAGE_BYTES} bytes, the limit of this server", param)
