"""The OpenAPI document: each endpoint, what it takes, what it answers, and how it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ed_esurge.server import answers, protocol

REFUSALS = {
    400: "The request is not as it should be; `param` names the field.",
    401: "An API key is missing or unknown.",
    404: "The model is not served here.",
    408: "The request did not arrive, or was not answered, in time.",
    413: "The body is too long.",
    415: "The body is compressed.",
    421: "The server does not answer for this host.",
    429: "Too many requests at once; `Retry-After` says when to try again.",
    500: "The server failed on this request.",
    503: "The engine cannot answer.",
}
READING = (401, 421)


@dataclass(frozen=True)
class Endpoint:
    """One endpoint.

    Attributes:
        takes: model of the body; None for a GET.
        gives: model of the answer; a string is the media type of a text.
        refusals: statuses of refusals.
    """

    path: str
    summary: str
    gives: type[BaseModel] | str
    takes: type[BaseModel] | None = None
    streams: bool = False
    refusals: tuple[int, ...] = READING


ENDPOINTS = (
    Endpoint(
        "/v1/completions",
        "Continue one or many prompts.",
        answers.Completion,
        protocol.CompletionRequest,
        streams=True,
        refusals=tuple(REFUSALS),
    ),
    Endpoint(
        "/v1/chat/completions",
        "Answer a conversation.",
        answers.ChatCompletion,
        protocol.ChatRequest,
        streams=True,
        refusals=tuple(REFUSALS),
    ),
    Endpoint("/v1/models", "The names that the model is served under.", answers.ModelList),
    Endpoint(
        "/v1/models/{model}", "One of these names.", answers.ModelCard, refusals=(*READING, 404)
    ),
    Endpoint(
        "/tokenize",
        "Text, or messages, to token ids.",
        answers.Tokens,
        protocol.TokenizeRequest,
        refusals=tuple(REFUSALS),
    ),
    Endpoint(
        "/detokenize",
        "Token ids to text.",
        answers.Text,
        protocol.DetokenizeRequest,
        refusals=tuple(REFUSALS),
    ),
    Endpoint("/health", "Whether requests are taken.", answers.State, refusals=(421, 503)),
    Endpoint("/health/ready", "The same.", answers.State, refusals=(421, 503)),
    Endpoint("/health/live", "Whether only a restart helps.", answers.State, refusals=(421, 503)),
    Endpoint("/metrics", "Prometheus metrics.", "text/plain", refusals=(421,)),
    Endpoint("/version", "The version of the server.", answers.Version, refusals=(421,)),
)


def document(version: str) -> dict[str, Any]:
    """The document, as JSON."""
    models: dict[tuple[type[BaseModel], Any], None] = {(answers.Error, "serialization"): None}
    for endpoint in ENDPOINTS:
        if endpoint.takes is not None:
            models[endpoint.takes, "validation"] = None
        if not isinstance(endpoint.gives, str):
            models[endpoint.gives, "serialization"] = None
    names, schemas = models_json_schema([*models], ref_template="#/components/schemas/{model}")
    references = {str(model): name for (model, _), name in names.items()}
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        operation = _operation(endpoint, references)
        paths[endpoint.path] = {"get" if endpoint.takes is None else "post": operation}
        if "{model}" in endpoint.path:
            schema = {"type": "string"}
            place = {"name": "model", "in": "path", "required": True, "schema": schema}
            operation["parameters"] = [place]
    bearer = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "ed-esurge", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"bearer": bearer},
        },
    }


def _operation(endpoint: Endpoint, names: dict[str, dict[str, Any]]) -> dict[str, Any]:
    if isinstance(endpoint.gives, str):
        content: dict[str, Any] = {endpoint.gives: {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": names[str(endpoint.gives)]}}
    if endpoint.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    refused = {"application/json": {"schema": names[str(answers.Error)]}}
    responses = {"200": {"description": endpoint.summary, "content": content}}
    for status in endpoint.refusals:
        shape = refused
        if status == 503 and endpoint.gives is answers.State:
            shape = content
        responses[str(status)] = {"description": REFUSALS[status], "content": shape}
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": responses}
    if 401 in endpoint.refusals:
        operation["security"] = [{}, {"bearer": []}]
    if endpoint.takes is not None:
        body = {"application/json": {"schema": names[str(endpoint.takes)]}}
        operation["requestBody"] = {"required": True, "content": body}
    return operation
