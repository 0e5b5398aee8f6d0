"""`POST /tokenize` and `/detokenize`: text to tokens and back, as vLLM spells them."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse

from ed_esurge.server.protocol import DetokenizeRequest, TokenizeRequest
from ed_esurge.server.served import Served


async def tokenize(served: Served, body: TokenizeRequest, request: Request) -> JSONResponse:
    """Token ids of a text, or of messages."""
    prompts = served.prompts
    if body.messages is not None:
        tokens = await prompts.conversation(
            body.messages, add_generation_prompt=body.add_generation_prompt
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
    if body.return_token_strs:
        answer["token_strs"] = [served.texts.text_of(token) for token in tokens]
    return JSONResponse(answer)


async def detokenize(served: Served, body: DetokenizeRequest, request: Request) -> JSONResponse:
    """Text of token ids."""
    served.prompts.check_tokens(body.tokens, param="tokens")
    return JSONResponse({"prompt": await served.prompts.decode(body.tokens)})
