"""The table of the endpoints: a new one is a file with its handler, and an entry here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from ed_esurge.server.batches import endpoints as batches
from ed_esurge.server.generation import answers
from ed_esurge.server.generation import requests as protocol
from ed_esurge.server.generation.models import Served
from ed_esurge.server.http.auth import Access
from ed_esurge.server.http.fields import Body
from ed_esurge.server.messages import endpoint as messages
from ed_esurge.server.messages.answer import AnthropicAnswer, TokenCount
from ed_esurge.server.messages.request import CountRequest, MessagesRequest
from ed_esurge.server.openai import model_names as models
from ed_esurge.server.openai import tokens
from ed_esurge.server.openai.chat import chat
from ed_esurge.server.openai.completions import complete
from ed_esurge.server.openai.embeddings import EmbeddingRequest, Embeddings, embed
from ed_esurge.server.openai.scores import (
    Reranked,
    RerankRequest,
    ScoreRequest,
    Scores,
    rerank,
    score,
)
from ed_esurge.server.operations import adapters, health
from ed_esurge.server.operations import admin as sleep
from ed_esurge.server.playground import playground
from ed_esurge.server.responses import endpoint as responses
from ed_esurge.server.responses.answer import Deleted, ResponseAnswer
from ed_esurge.server.responses.request import ResponseRequest

REFUSALS = {
    400: "The request is not as it should be; `param` names the field.",
    401: "An API key is missing or unknown.",
    403: "The server does not do that for its clients, or not for the page that asks.",
    404: "The model, or what the path names, is not here.",
    408: "The request did not arrive, or was not answered, in time.",
    409: "What is asked for cannot be done now.",
    413: "The body is too long.",
    415: "The body is compressed.",
    421: "The server does not answer for this host.",
    429: "Too many requests at once; `Retry-After` says when to try again.",
    500: "The server failed on this request.",
    503: "The engine cannot answer.",
}
READING = (401, 421)
LISTING = (*READING, 400, 404)


@dataclass(frozen=True)
class Endpoint:
    """One endpoint.

    Attributes:
        answer: gets the request and, where there is a body, the body and the model that it names;
            where there is none, the whole site.
        of_the_site: it gets the whole site although it has a body.
        access: who may call it, where the server has keys.
        takes: model of the body; None where there is none.
        gives: model of the answer; a string is the media type of a text.
        refusals: statuses of refusals.
        method: that of a body is POST.
    """

    path: str
    summary: str
    answer: Callable[..., Awaitable[Response]]
    gives: type[BaseModel] | str
    takes: type[Body] | None = None
    streams: bool = False
    refusals: tuple[int, ...] = READING
    method: Literal["GET", "POST", "DELETE"] = "GET"
    of_the_site: bool = False
    access: Access = "key"


def _post(
    path: str,
    summary: str,
    answer: Callable[[Served, Any, Request], Awaitable[Response]],
    takes: type[Body],
    gives: type[BaseModel] | str,
    *,
    streams: bool = False,
    access: Access = "key",
) -> Endpoint:
    return Endpoint(
        path, summary, answer, gives, takes, streams, tuple(REFUSALS), "POST", access=access
    )


ENDPOINTS = (
    Endpoint(
        "/", "A page to try the models.", playground, "text/html", refusals=(421,), access="open"
    ),
    _post(
        "/v1/completions",
        "Continue one or many prompts.",
        complete,
        protocol.CompletionRequest,
        answers.Completion,
        streams=True,
    ),
    _post(
        "/v1/chat/completions",
        "Answer a conversation.",
        chat,
        protocol.ChatRequest,
        answers.ChatCompletion,
        streams=True,
    ),
    _post(
        "/v1/responses",
        "Answer an input; the answer may be kept, and followed.",
        responses.create,
        ResponseRequest,
        ResponseAnswer,
        streams=True,
    ),
    Endpoint(
        "/v1/responses/{response_id}",
        "An answer that was kept.",
        responses.retrieve,
        ResponseAnswer,
        refusals=(*READING, 404),
    ),
    Endpoint(
        "/v1/responses/{response_id}",
        "Forget an answer.",
        responses.delete,
        Deleted,
        refusals=(*READING, 404),
        method="DELETE",
    ),
    _post(
        "/v1/messages",
        "Answer a conversation, as Anthropic's API does.",
        messages.message,
        MessagesRequest,
        AnthropicAnswer,
        streams=True,
    ),
    _post(
        "/v1/messages/count_tokens",
        "Tokens of such a conversation.",
        messages.count_tokens,
        CountRequest,
        TokenCount,
    ),
    _post("/v1/embeddings", "Texts to vectors.", embed, EmbeddingRequest, Embeddings),
    *(
        _post(path, "How alike texts are.", score, ScoreRequest, Scores)
        for path in ("/v1/score", "/score")
    ),
    *(
        _post(path, "Documents by how well they fit.", rerank, RerankRequest, Reranked)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    Endpoint(
        "/v1/files",
        "Keep a file of requests; a form with the fields purpose and file.",
        batches.upload,
        batches.StoredFile,
        refusals=(*READING, 400, 404, 408, 413, 429),
        method="POST",
    ),
    Endpoint("/v1/files", "The files.", batches.files, batches.FileList, refusals=LISTING),
    Endpoint(
        "/v1/files/{file_id}", "A file.", batches.file, batches.StoredFile, refusals=(*READING, 404)
    ),
    Endpoint(
        "/v1/files/{file_id}/content",
        "What is in a file.",
        batches.content,
        "application/octet-stream",
        refusals=(*READING, 404),
    ),
    Endpoint(
        "/v1/files/{file_id}",
        "Forget a file.",
        batches.delete,
        batches.FileDeleted,
        refusals=(*READING, 404, 409),
        method="DELETE",
    ),
    Endpoint(
        "/v1/batches",
        "Answer the requests of a file, line by line.",
        batches.create,
        batches.Batch,
        batches.BatchRequest,
        refusals=tuple(REFUSALS),
        method="POST",
        of_the_site=True,
    ),
    Endpoint("/v1/batches", "The batches.", batches.batches, batches.BatchList, refusals=LISTING),
    Endpoint(
        "/v1/batches/{batch_id}",
        "How far a batch is.",
        batches.batch,
        batches.Batch,
        refusals=(*READING, 404),
    ),
    Endpoint(
        "/v1/batches/{batch_id}/cancel",
        "Begin no further line.",
        batches.cancel,
        batches.Batch,
        refusals=(*READING, 404, 409),
        method="POST",
    ),
    Endpoint(
        "/v1/models",
        "The names that models and their adapters are served under.",
        models.names,
        answers.ModelList,
    ),
    Endpoint(
        "/v1/models/{model}",
        "One of these names.",
        models.one,
        answers.ModelCard,
        refusals=(*READING, 404),
    ),
    _post(
        "/v1/load_lora_adapter",
        "Serve a LoRA adapter; where the server may load some.",
        adapters.load,
        adapters.LoadAdapterRequest,
        "text/plain",
        access="admin",
    ),
    _post(
        "/v1/unload_lora_adapter",
        "Serve a LoRA adapter no longer.",
        adapters.unload,
        adapters.UnloadAdapterRequest,
        "text/plain",
        access="admin",
    ),
    _post(
        "/tokenize",
        "Text, or messages, to token ids.",
        tokens.tokenize,
        protocol.TokenizeRequest,
        answers.Tokens,
    ),
    _post(
        "/detokenize",
        "Token ids to text.",
        tokens.detokenize,
        protocol.DetokenizeRequest,
        answers.Text,
    ),
    Endpoint(
        "/tokenizer_info",
        "The configuration of the tokenizer.",
        tokens.info,
        answers.TokenizerInfo,
        refusals=(*READING, 404),
    ),
    Endpoint(
        "/reset_prefix_cache",
        "Forget all cached prefixes.",
        sleep.reset_prefix_cache,
        "text/plain",
        refusals=(*READING, 400, 403, 404, 503),
        method="POST",
        access="admin",
    ),
    Endpoint(
        "/sleep",
        "Lend the memory of the device to others; where the server does that.",
        sleep.sleep,
        answers.Sleeping,
        refusals=(*READING, 400, 403, 404, 409, 503),
        method="POST",
        access="admin",
    ),
    Endpoint(
        "/wake_up",
        "Go on after that.",
        sleep.wake_up,
        answers.Sleeping,
        refusals=(*READING, 400, 403, 404, 409, 503),
        method="POST",
        access="admin",
    ),
    Endpoint(
        "/is_sleeping",
        "Whether the memory of the device is lent.",
        sleep.is_sleeping,
        answers.Sleeping,
        refusals=(*READING, 400, 403, 404),
    ),
    *(
        Endpoint(
            path,
            "Whether requests are taken.",
            health.ready,
            answers.State,
            refusals=(421, 503),
            access="open",
        )
        for path in ("/health", "/health/ready")
    ),
    Endpoint(
        "/health/live",
        "Whether only a restart helps.",
        health.live,
        answers.State,
        refusals=(421, 503),
        access="open",
    ),
    Endpoint(
        "/health/decode",
        "Whether the model gives a token.",
        health.decode,
        answers.State,
        refusals=(421, 503),
        access="open",
    ),
    *(
        Endpoint(
            "/ping",
            "Whether requests are taken; the body is empty.",
            health.ping,
            "text/plain",
            refusals=(421, 503),
            method=method,
            access="open",
        )
        for method in ("GET", "POST")
    ),
    Endpoint(
        "/load",
        "How many requests wait or run.",
        health.load,
        answers.Load,
        refusals=(421,),
        access="open",
    ),
    Endpoint(
        "/metrics",
        "Prometheus metrics.",
        health.metrics,
        "text/plain",
        refusals=(421,),
        access="open",
    ),
    Endpoint(
        "/version",
        "The version of the server.",
        health.version,
        answers.Version,
        refusals=(421,),
        access="open",
    ),
)
