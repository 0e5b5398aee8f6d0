"""The OpenAPI document: each endpoint with its body, its answer and its errors."""

from __future__ import annotations

import json
import re
import threading
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ed_esurge.server.endpoints import list_endpoints
from ed_esurge.server.generation import answers
from ed_esurge.server.routing import REFUSALS, Endpoint

_RENDERING = threading.Lock()


def render_document(version: str) -> bytes:
    """Return the text of the document. The first call creates the text, which lasts long."""
    with _RENDERING:
        return _render(version)


@cache
def _render(version: str) -> bytes:
    return json.dumps(document(version), ensure_ascii=False, separators=(",", ":")).encode()


def document(version: str) -> dict[str, Any]:
    """Return the document as JSON."""
    models: dict[tuple[type[BaseModel], Any], None] = {
        (answers.Error, "serialization"): None,
    }
    for endpoint in list_endpoints():
        if endpoint.api is not None:
            models[endpoint.api.error, "serialization"] = None
        if endpoint.accepts is not None:
            models[endpoint.accepts, "validation"] = None
        if not isinstance(endpoint.returns, str):
            models[endpoint.returns, "serialization"] = None
    names, schemas = models_json_schema([*models], ref_template="#/components/schemas/{model}")
    references = {str(model): name for (model, _), name in names.items()}
    paths: dict[str, Any] = {}
    for endpoint in list_endpoints():
        operation = _operation(endpoint, references)
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
        names_in_path = re.findall(r"{(\w+)}", endpoint.path)
        if names_in_path:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in names_in_path
            ]
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
    if isinstance(endpoint.returns, str):
        content: dict[str, Any] = {endpoint.returns: {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": names[str(endpoint.returns)]}}
    if endpoint.streams:
        kind = "text/event-stream" if endpoint.api is None else endpoint.api.stream_type
        content[kind] = {"schema": {"type": "string"}}
    envelope = answers.Error if endpoint.api is None else endpoint.api.error
    refused = {"application/json": {"schema": names[str(envelope)]}}
    responses = {"200": {"description": endpoint.summary, "content": content}}
    for status in endpoint.error_statuses:
        shape = refused
        if status == 503 and endpoint.returns is answers.HealthState:
            shape = content
        responses[str(status)] = {"description": REFUSALS[status], "content": shape}
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": responses}
    if endpoint.access != "open":
        operation["security"] = [{}, {"bearer": []}]
    if endpoint.accepts is not None:
        kind = "multipart/form-data" if endpoint.form else "application/json"
        body = {kind: {"schema": names[str(endpoint.accepts)]}}
        operation["requestBody"] = {"required": True, "content": body}
    return operation
