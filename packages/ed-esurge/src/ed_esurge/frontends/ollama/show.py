"""`POST /api/show`: facts about one model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from ed_infra.errors import CheckpointError
from starlette.requests import Request
from starlette.responses import JSONResponse

from ed_esurge.frontends.library.checkpoint_files import CheckpointFiles
from ed_esurge.frontends.ollama.model_facts import ListedModel, ModelDetails
from ed_esurge.frontends.ollama.replies import timestamp
from ed_esurge.frontends.ollama.requests import ModelReference
from ed_esurge.server.generation.abilities import EMBEDS, GENERATES
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.auth import get_owner
from ed_esurge.server.http.body import in_thread
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.http.fields import RequestBody
from ed_esurge.server.routing import REFUSALS, Endpoint

#: Key of `model_info` -> names of the field in `config.json`.
_INFO = {
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "block_count": ("num_hidden_layers", "n_layer"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "vocab_size": ("vocab_size",),
}


class ShowRequest(RequestBody):
    """Body of `POST /api/show`."""

    ALIASES: ClassVar[Mapping[str, str]] = {"name": "model"}

    model: ModelReference
    verbose: bool = False
    """Whether `model_info` has the whole `config.json` under `config`."""


class ShownModel(AnswerBody):
    """Answer of `POST /api/show`."""

    modelfile: str
    parameters: str
    template: str
    license: str
    system: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


async def _show_model(server: ServedModels, body: ShowRequest, request: Request) -> JSONResponse:
    """Return facts about a model, without loading the model.

    Raises:
        APIError: 400, the files of the model are damaged; 404, the model does not exist.
    """
    owner = get_owner(request.scope)

    def work() -> dict[str, Any]:
        facts = ListedModel.of(server, body.model, owner)
        definition, files = facts.definition, facts.files
        if files is not None:
            try:
                files.check()
            except CheckpointError as error:
                raise APIError(str(error), param="model", code="model_not_loadable") from None
        template = files.chat_template if files is not None else ""
        if facts.model is not None:
            template = facts.model.prompts.template_text
        parameters = _lines(definition.parameters if definition is not None else {})
        system = (definition.system if definition is not None else None) or ""
        info = _info(files) if files is not None else {}
        if body.verbose and files is not None:
            info["config"] = files.config
        return {
            "modelfile": _modelfile(facts, parameters, system),
            "parameters": "\n".join(parameters),
            "template": template,
            "license": "\n".join(definition.license if definition is not None else ()),
            "system": system,
            "details": facts.details(),
            "model_info": info,
            "capabilities": _capabilities(facts),
            "modified_at": timestamp(facts.modified),
        }

    return JSONResponse(await in_thread(work))


def _lines(parameters: dict[str, Any]) -> list[str]:
    lines = []
    for name, value in parameters.items():
        for one in value if isinstance(value, list) else [value]:
            lines.append(f"{name} {json.dumps(one) if isinstance(one, str) else one}")
    return lines


def _modelfile(facts: ListedModel, parameters: list[str], system: str) -> str:
    source = facts.definition.source if facts.definition is not None else facts.name
    lines = [f"FROM {source}", *(f"PARAMETER {line}" for line in parameters)]
    if system:
        lines.append(f"SYSTEM {json.dumps(system, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def _info(files: CheckpointFiles) -> dict[str, Any]:
    family = files.family
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.parameter_count": files.parameters,
    }
    for key, names in _INFO.items():
        if (value := files.read_size(*names)) is not None:
            info[f"{family}.{key}"] = value
    return info


def _capabilities(facts: ListedModel) -> list[str]:
    """Return what a model can do. Without loading, the files decide."""
    model = facts.model
    if model is not None:
        return _list_model_capabilities(model)
    files = facts.files
    assert files is not None, "a model has files, or is in memory"
    architecture_names = files.config.get("architectures")
    architectures = (
        " ".join(map(str, architecture_names)) if isinstance(architecture_names, list) else ""
    )
    if "ForCausalLM" not in architectures and "ForConditionalGeneration" not in architectures:
        return ["embedding"]
    return ["completion", "tools"] if files.chat_template else ["completion"]


def _list_model_capabilities(model: ServedModel) -> list[str]:
    capabilities: list[str] = []
    if GENERATES.has(model):
        capabilities.append("completion")
        if model.prompts.has_template and model.formats.enabled:
            capabilities.append("tools")
        if "pixel_values" in getattr(model.engine, "input_names", ()):
            capabilities.append("vision")
        if model.formats.reasoning is not None:
            capabilities.append("thinking")
        if model.prompts.gaps.form is not None:
            capabilities.append("insert")
    elif EMBEDS.has(model):
        capabilities.append("embedding")
    return capabilities


ENDPOINTS = (
    Endpoint(
        "/api/show",
        "Describe a model in the format of Ollama's API.",
        _show_model,
        ShownModel,
        ShowRequest,
        method="POST",
        whole_server=True,
        error_statuses=tuple(REFUSALS),
    ),
)
