"""`POST /tokenize` and `/detokenize`, and `GET /tokenizer_info`, with vLLM's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import to_json
from tokenizers import AddedToken

from ed_esurge.server.generation.models import Served
from ed_esurge.server.generation.requests import DetokenizeRequest, TokenizeRequest
from ed_esurge.server.generation.site import Site
from ed_esurge.server.http.auth import owner_of
from ed_esurge.server.http.threads import aside, size_of


async def tokenize(served: Served, body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a text, or of messages."""
    prompts = served.prompts
    if body.messages is not None:
        tokens = await prompts.conversation(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            size=size_of(request),
        )
    else:
        (tokens,) = await prompts.encode(
            [body.prompt or ""], add_special_tokens=body.add_special_tokens
        )
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": prompts.max_model_len,
        "tokens": tokens,
    }

    def content() -> bytes:
        if body.return_token_strs:
            answer["token_strs"] = [served.texts.text_of(token) for token in tokens]
        return to_json(answer)

    return Response(await aside(content, len(tokens)), media_type="application/json")


async def detokenize(served: Served, body: DetokenizeRequest, request: Request) -> JSONResponse:
    """Text of token ids."""
    served.prompts.check_tokens(body.tokens, param="tokens")
    return JSONResponse({"prompt": await served.prompts.decode(body.tokens)})


async def info(site: Site, request: Request) -> JSONResponse:
    """What the tokenizer's configuration says; `model` of the query names one of several models.

    Raises:
        APIError: 404, there is no such model.
    """
    prompts = site.find(request.query_params.get("model"), owner_of(request.scope)).prompts
    known = _plain(getattr(prompts.tokenizer, "init_kwargs", {}))
    return JSONResponse(
        {
            **{name: value for name, value in known.items() if not _names_a_place(name)},
            "tokenizer_class": type(prompts.tokenizer).__name__,
            "chat_template": prompts.template_text or None,
        }
    )


def _names_a_place(option: str) -> bool:
    """Whether an option of a tokenizer is a path or an object of this process."""
    return option.endswith(("_file", "_path", "_dir", "_object"))


def _plain(value: Any) -> Any:
    """A value as JSON: added tokens are objects, and what JSON lacks is text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, AddedToken):
        names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
        return {name: getattr(value, name) for name in names}
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
