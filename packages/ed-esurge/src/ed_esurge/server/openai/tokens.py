"""`GET /v1/models`, and vLLM's `/tokenize`, `/detokenize` and `/tokenizer_info`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tokenizers import AddedToken

from ed_esurge.server.generation.answer_size import ID_BYTES, STRING_BYTES
from ed_esurge.server.generation.answers import (
    DetokenizedText,
    ModelCard,
    ModelList,
    TokenizedText,
    TokenizerInfo,
)
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.rendering import ConversationOptions
from ed_esurge.server.generation.requests import DetokenizeRequest, TokenizeRequest
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.auth import get_owner
from ed_esurge.server.http.body import get_body_size, in_thread
from ed_esurge.server.http.json_parts import JsonItems, JsonPieces, write_json
from ed_esurge.server.routing import READING, Endpoint, post


async def tokenize(model: ServedModel, body: TokenizeRequest, request: Request) -> Response:
    """Return the token ids of a text or of messages."""
    prompts = model.prompts
    if body.messages is not None:
        options = ConversationOptions(add_generation_prompt=body.add_generation_prompt)
        prompt = await prompts.conversation(body.messages, options, size=get_body_size(request))
        tokens = prompt.tokens
    else:
        (tokens,) = await prompts.encode(
            [body.prompt or body.content or ""], add_special_tokens=body.adds_special_tokens
        )
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": prompts.max_model_len,
        "tokens": tokens,
    }
    size = model.answer_size(request)
    count = len(tokens) * (ID_BYTES + STRING_BYTES * body.return_token_strs)
    size.check(count, "prompt", f"send shorter texts (the answer has {len(tokens)} tokens)")
    size.add(count)
    if body.return_token_strs:
        answer["token_strs"] = JsonItems(
            lambda: (model.texts.get_text(token) for token in tokens), 2**12
        )
    answer["tokens"] = JsonItems(lambda: tokens, 2**12)
    return JsonPieces(await write_json(answer, count))


async def detokenize(model: ServedModel, body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of token ids, with the names of vLLM and of llama.cpp."""
    model.prompts.check_ids(body.tokens, "tokens")
    text = await model.prompts.decode(body.tokens)
    return JsonPieces(await write_json({"prompt": text, "content": text}, 2 * len(text)))


async def info(server: ServedModels, request: Request) -> JSONResponse:
    """Return the configuration of the tokenizer; query parameter: `model`.

    Raises:
        APIError: 404, the model does not exist.
    """
    name = request.query_params.get("model")
    async with server.using(name, get_owner(request.scope)) as model:
        prompts = model.prompts
    settings = _convert_to_json(getattr(prompts.tokenizer, "init_kwargs", {}))
    return JSONResponse(
        {
            **{name: value for name, value in settings.items() if not _names_a_place(name)},
            "tokenizer_class": type(prompts.tokenizer).__name__,
            "chat_template": prompts.template_text or None,
        }
    )


def _names_a_place(option: str) -> bool:
    """Return whether an option of a tokenizer is a path or an object of this process."""
    return option.endswith(("_file", "_path", "_dir", "_object"))


def _convert_to_json(value: object) -> Any:
    """Return a value as JSON: added tokens as objects, other values as text."""
    if isinstance(value, Mapping):
        return {str(key): _convert_to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_convert_to_json(item) for item in value]
    if isinstance(value, AddedToken):
        names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
        return {name: getattr(value, name) for name in names}
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


async def _list_tokens(server: ServedModels, request: Request) -> JSONResponse:
    """Return the models, and the adapters that the key may use, for the clients of both APIs."""
    owner = get_owner(request.scope)
    data = [_for_both_apis(card) for card in await in_thread(lambda: server.cards(owner))]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return JSONResponse({"object": "list", "data": data, **ends, "has_more": False})


def _for_both_apis(card: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of OpenAI's API with the fields of Anthropic's API."""
    created = datetime.fromtimestamp(card["created"], UTC).isoformat()
    return {
        **card,
        "type": "model",
        "display_name": card["id"],
        "created_at": created,
        "lifecycle": "active",
        "max_input_tokens": card["max_model_len"],
    }


async def one(server: ServedModels, request: Request) -> JSONResponse:
    """Return one model or adapter.

    Raises:
        APIError: 404.
    """
    name, owner = request.path_params["model"], get_owner(request.scope)
    cards = await in_thread(lambda: server.cards(owner))
    if all(card["id"] != name for card in cards):
        server.find(name, owner)  # raises the error, unless the name was added meanwhile
        cards = await in_thread(lambda: server.cards(owner))
    card = next(card for card in cards if card["id"] == name)
    return JSONResponse(_for_both_apis(card))


ENDPOINTS = (
    Endpoint("/v1/models", "List the names of models and adapters.", _list_tokens, ModelList),
    Endpoint(
        "/v1/models/{model}",
        "Describe a model or an adapter.",
        one,
        ModelCard,
        error_statuses=(*READING, 404),
    ),
    post(
        "/tokenize",
        "Convert text or messages to token ids.",
        tokenize,
        TokenizeRequest,
        TokenizedText,
    ),
    post(
        "/detokenize", "Convert token ids to text.", detokenize, DetokenizeRequest, DetokenizedText
    ),
    Endpoint(
        "/tokenizer_info",
        "Return the configuration of the tokenizer.",
        info,
        TokenizerInfo,
        error_statuses=(*READING, 404),
    ),
)
