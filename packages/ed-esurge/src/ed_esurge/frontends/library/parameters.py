"""Sampling options in Ollama's spelling, and their conversion to the fields of a chat request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.http.fields import LLAMA_SAMPLERS, LlamaSamplers, Stops, reject_field

#: Ollama's defaults, which differ from those of OpenAI.
OLLAMA_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
#: Option -> field of a chat request.
_FIELDS = {
    **{
        name: name
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "seed", "stop"),
            *("presence_penalty", "frequency_penalty"),
            *LLAMA_SAMPLERS,
        )
    },
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_tokens",
}

#: Penalties -> the value without an effect.
PENALTIES = {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


class SamplingOptions(LlamaSamplers):
    """Options of a request or of a derived model.

    Options about the memory and the threads of Ollama's runner (`num_gpu`, `num_thread`, …) are
    unknown fields here.
    """

    num_predict: Annotated[int | None, Field(ge=-2, lt=2**31)] = None
    """Maximum number of tokens; a negative number = as many as fit."""
    num_ctx: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    """Maximum number of tokens of prompt and answer together, at most the model's maximum."""
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stop: Stops | None = None
    repeat_penalty: Annotated[float | None, Field(ge=1e-3, le=1e3)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repeat_last_n: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    """Number of the last tokens that penalties read: -1 = all, 0 = no penalties."""
    tfs_z: Annotated[None, reject_field("tail-free sampling; send min_p", 1, 1.0)] = None
    penalize_newline: Annotated[
        None, reject_field("exceptions of penalties; send logit_bias", True)
    ] = None

    def values(self) -> dict[str, Any]:
        """Return the given options."""
        return self.model_dump(exclude_none=True, exclude_unset=True)


def get_server_defaults(model: ServedModel) -> dict[str, float]:
    """Return the operator's values of omitted options (`override_generation_config`)."""
    values = model.state.options.override_generation_config.values
    return {name: values[field] for name, field in _FIELDS.items() if field in values}


def chat_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat request for options in Ollama's spelling.

    Raises:
        APIError: 400, penalties of the last tokens, which the engine does not compute.
    """
    fields = {field: options[name] for name, field in _FIELDS.items() if name in options}
    if (fields.get("max_tokens") or 0) < 0:
        del fields["max_tokens"]
    if options.get("seed") == -1:  # a random seed
        del fields["seed"]
    last = options.get("repeat_last_n", -1)
    if last == -1:
        return fields
    active = [name for name, neutral in PENALTIES.items() if options.get(name, neutral) != neutral]
    if last > 0 and active:
        raise APIError(
            f"{last} would limit {', '.join(active)} to the last tokens, and the penalties of this "
            "server read all tokens: send -1, or 0 for no penalties",
            param="repeat_last_n",
            code="unsupported_value",
        )
    return {name: value for name, value in fields.items() if name not in map(_FIELDS.get, active)}
