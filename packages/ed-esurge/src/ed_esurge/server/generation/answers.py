"""Models of the answers, for the OpenAPI document. Handlers create plain dicts for speed, and tests
validate them against these models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Reason = Literal["stop", "length"]


class Answer(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(extra="forbid")


class ErrorBody(Answer):
    """Message, type and code of an error, and the invalid field."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    """OpenAI's error envelope."""

    error: ErrorBody


class PromptDetails(Answer):
    """Numbers of prompt tokens read from the prefix cache, and removed from a truncated prompt."""

    cached_tokens: int
    truncated_tokens: int | None = None


class Usage(Answer):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


PromptLogprobs = list[dict[str, dict[str, Any]] | None]


class CompletionScores(Answer):
    """Log-probabilities of the completions endpoint, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One completion. The last three fields are present if requested."""

    index: int
    text: str
    logprobs: CompletionScores | None
    finish_reason: Reason
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(Answer):
    """Answer of `POST /v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TokenScore(Answer):
    """One token, its log-probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenScore(TokenScore):
    """A token of an answer, with the most probable tokens at its position."""

    top_logprobs: list[TokenScore]


class ChatScores(Answer):
    """Log-probabilities of the chat endpoint."""

    content: list[ChosenScore]
    refusal: None


class AnsweredFunction(Answer):
    """A called function. `arguments` is JSON text."""

    name: str
    arguments: str


class AnsweredCall(Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnsweredMessage(Answer):
    """The assistant's message. `content` is null if there are only calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class ChatChoice(Answer):
    """One answer. `token_ids` is present if requested."""

    index: int
    message: AnsweredMessage
    logprobs: ChatScores | None
    finish_reason: Reason | Literal["tool_calls"]
    token_ids: list[int] | None = None


class ChatCompletion(Answer):
    """Answer of `POST /v1/chat/completions`. The last two fields are present if requested."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ModelCard(Answer):
    """A model. The `parent` of a LoRA adapter is its base model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(Answer):
    """Answer of `GET /v1/models`."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Answer):
    """Answer of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(Answer):
    """Answer of `POST /detokenize`."""

    prompt: str


class State(Answer):
    """Answer of the health endpoints."""

    status: Literal["ok", "down", "draining", "sleeping"]
    reason: str | None = None
    degraded: dict[str, str] | None = None
    """Impaired parts of the server, with the reason; absent if all parts work."""


class Load(Answer):
    """Answer of `GET /load`: the number of waiting and running requests."""

    server_load: int


class TokenizerInfo(BaseModel):
    """Answer of `GET /tokenizer_info`: the content of `tokenizer_config.json`."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    chat_template: str | None = None


class Sleeping(Answer):
    """Answer of `/sleep`, `/wake_up` and `/is_sleeping`."""

    is_sleeping: bool


class Version(Answer):
    """Answer of `GET /version`."""

    version: str
