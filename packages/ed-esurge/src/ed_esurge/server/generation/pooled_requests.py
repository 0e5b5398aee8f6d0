"""Requests for pooled vectors and scores: the fields that their endpoints share. The names are
vLLM's."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from ed_esurge.server.generation.requests import ChatMessages, validate_prompts
from ed_esurge.server.generation.text_pairs import PairSide
from ed_esurge.server.http.errors import InvalidField
from ed_esurge.server.http.fields import ClientText, RequestBody, reject_field
from ed_esurge.server.http.json_parts import JsonItems, JsonText

PoolingName = Literal["last", "mean"]
# Numbers of one piece of text; the bytes of such a piece are a multiple of three.
_NUMBERS = 3 * 2**11
_DTYPES = {"float32": "f4", "float16": "f2"}
_TEMPLATE = "start the server with chat_template="


def _limit(value: object) -> object:
    if value == 0:
        raise InvalidField("0 would remove the entire text; -1 keeps as many tokens as fit")
    return value


class PooledRequest(RequestBody):
    """Fields of every request for vectors or scores."""

    model: str | None = None
    user: ClientText | None = None
    request_id: Annotated[str | None, Field(pattern=r"^[\x21-\x7e]{1,128}$")] = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=1024)] = None
    truncate_prompt_tokens: Annotated[
        int | None, BeforeValidator(_limit), Field(ge=-1, lt=2**31)
    ] = None
    """Maximum number of tokens of a text, with special tokens; -1 = as many as fit."""
    truncation_side: PairSide | None = None
    """The side that loses tokens; null = that of the tokenizer. Special tokens are kept."""
    padding: Annotated[
        None, reject_field("the attention mask makes padding unnecessary, omit it", "do_not_pad")
    ] = None
    mm_processor_kwargs: Annotated[
        None, reject_field("the models of this endpoint read text, omit the field", {})
    ] = None


def _one_conversation(value: object) -> object:
    if isinstance(value, list) and value and isinstance(value[0], list):
        raise InvalidField("has several conversations: send one conversation in each request")
    return value


def _prompts(value: object) -> object:
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        first = value[0][0] if isinstance(value[0], list) and value[0] else value[0]
        if isinstance(first, dict):
            raise InvalidField("contains messages: send one conversation in the field messages")
    return validate_prompts(value)


class TextRequest(PooledRequest):
    """A request with texts or token ids (`input`), or a conversation (`messages`)."""

    input: Annotated[
        list[str | list[int]] | None,
        PlainValidator(_prompts, json_schema_input_type=str | list[str | int | list[int]]),
    ] = None
    """Texts, or lists of token ids. One of them is converted to a list."""
    messages: Annotated[ChatMessages | None, BeforeValidator(_one_conversation)] = None
    """A conversation, which the chat template converts to one text."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds special tokens to texts; null = true. A chat template adds them
    itself."""
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: Annotated[None, reject_field(f"a chat template; {_TEMPLATE}")] = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: Annotated[
        None, reject_field("the models of this endpoint read text, omit the field", {})
    ] = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise InvalidField("send either input or messages", "input")
        if self.messages is None:
            for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
                if getattr(self, name):
                    raise InvalidField("has an effect on messages only: omit it", name)
        elif self.add_special_tokens:
            raise InvalidField(
                "has no effect on messages, because the chat template adds special tokens: omit it",
                "add_special_tokens",
            )
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidField(
                "excludes add_generation_prompt: set one of them", "continue_final_message"
            )
        return self


def _encoding(value: object) -> object:
    if value in ("bytes", "bytes_only"):
        raise InvalidField(f"{value!r} is not supported: use base64, which has the same bytes")
    return value


def _dtype(value: object) -> object:
    if isinstance(value, str) and value in ("bfloat16", "fp8_e4m3", "fp8_e5m2"):
        raise InvalidField(f"{value!r} is not supported: use float16 or float32")
    return value


class EncodingFields(RequestBody):
    """How an answer represents vectors."""

    encoding_format: Annotated[Literal["float", "base64"], BeforeValidator(_encoding)] = "float"
    embed_dtype: Annotated[Literal["float32", "float16"], BeforeValidator(_dtype)] = "float32"
    """Type of the numbers of base64."""
    endianness: Literal["native", "little", "big"] = "native"
    """Byte order of the numbers of base64."""

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        for name, default in (("embed_dtype", "float32"), ("endianness", "native")):
            value = getattr(self, name)
            if self.encoding_format == "float" and value != default:
                raise InvalidField(
                    f"{value!r} has no effect with encoding_format 'float': use base64", name
                )
        return self

    def encode_vectors(self, vectors: np.ndarray) -> JsonItems | JsonText:
        """Return numbers as lists, or as base64 of their bytes, created while they are written."""
        if self.encoding_format == "float":
            if vectors.ndim == 1:
                return JsonItems(lambda: vectors.tolist(), _NUMBERS)
            return JsonItems(lambda: (row.tolist() for row in vectors), 1)
        order = {"native": "=", "little": "<", "big": ">"}[self.endianness]
        form = order + _DTYPES[self.embed_dtype]

        def texts() -> Iterator[str]:
            flat = vectors.reshape(-1)
            for start in range(0, len(flat), _NUMBERS):
                numbers = flat[start : start + _NUMBERS].astype(form)
                yield base64.b64encode(numbers.tobytes()).decode()

        return JsonText(texts)
