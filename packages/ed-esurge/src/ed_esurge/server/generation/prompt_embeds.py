"""The field `prompt_embeds` of completion requests: embeddings instead of a prompt.

An item is a safetensors file in base64 with one tensor [n, d]. Other formats, such as those of
`torch.save`, can contain code or tensors whose size is not that of the file.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, NoReturn

import numpy as np
from ed_infra.errors import ConfigError
from ed_models.checkpoints.tensor_files import DTYPES
from safetensors import SafetensorError, deserialize

from ed_esurge.server.generation.prompts import EncodedPrompt
from ed_esurge.server.http.body import aside
from ed_esurge.server.http.errors import APIError

#: Name of the field.
_FIELD = "prompt_embeds"
#: Names of the accepted types in the header of a file.
ACCEPTED = ("F32", "F16", "BF16")


async def read_prompt_embeds(engine: Any, items: list[str]) -> list[EncodedPrompt]:
    """Return the prompts of the field.

    Args:
        engine: the engine, whose model reads the embeddings.
        items: files in base64.

    Raises:
        APIError: 400, the engine accepts no embeddings, or a file is invalid.
    """

    def work() -> list[EncodedPrompt]:
        return [_prompt(engine, item, place) for place, item in enumerate(items)]

    if not engine.config.enable_prompt_embeds:
        raise APIError(
            "this server does not accept prompts of embeddings: start the server with "
            "--enable-prompt-embeds, or send text or token ids as prompt",
            param=_FIELD,
            code="unsupported_value",
        )
    return await aside(work, sum(map(len, items)))


def _prompt(engine: Any, item: str, place: int) -> EncodedPrompt:
    embeds = decode_tensor(item, place)
    try:
        return EncodedPrompt(*engine.embedded_prompt(embeds))
    except ConfigError as error:
        _refuse(str(error), place)


def decode_tensor(item: str, place: int) -> np.ndarray:
    """Return the tensor of a file. The copies of the file are not larger than the request.

    Args:
        item: the file in base64.
        place: index of the item, for errors.

    Raises:
        APIError: 400, the file is invalid.
    """
    try:
        data = base64.b64decode(item, validate=True)
    except (binascii.Error, ValueError):
        _refuse("the text is not valid base64: send a safetensors file in base64", place)
    try:
        tensors = deserialize(data)
    except SafetensorError as error:
        _refuse(
            f"the {len(data)} bytes are not a safetensors file ({error}): files of torch.save are "
            "not accepted; use safetensors.torch.save({'prompt_embeds': tensor})",
            place,
        )
    if len(tensors) != 1:
        _refuse(f"the file has {len(tensors)} tensors: send one tensor [n, d]", place)
    ((name, tensor),) = tensors
    if tensor["dtype"] not in ACCEPTED:
        _refuse(
            f"tensor {name[:64]!r} has the type {tensor['dtype']}: send {', '.join(ACCEPTED)}",
            place,
        )
    return np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])


def _refuse(message: str, place: int) -> NoReturn:
    raise APIError(f"{_FIELD}[{place}]: {message}", param=_FIELD, code="invalid_value")
