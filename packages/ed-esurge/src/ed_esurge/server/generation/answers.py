"""Models of the answers, for the OpenAPI document. Handlers create plain dicts for speed, and tests
validate them against these models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Reason = Literal["stop", "length"]


class AnswerBody(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(extra="forbid")


class ErrorBody(AnswerBody):
    """Message, type and code of an error, and the invalid field."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(AnswerBody):
    """OpenAI's error envelope."""

    error: ErrorBody


class PromptDetails(AnswerBody):
    """Numbers of prompt tokens read from the prefix cache, and removed from a truncated prompt."""

    cached_tokens: int
    truncated_tokens: int | None = None


class Usage(AnswerBody):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


PromptLogprobs = list[dict[str, dict[str, Any]] | None]


class CompletionScores(AnswerBody):
    """Log-probabilities of the completions endpoint, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(AnswerBody):
    """One completion. The last three fields are present if requested."""

    index: int
    text: str
    logprobs: CompletionScores | None
    finish_reason: Reason
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(AnswerBody):
    """Answer of `POST /v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TokenScore(AnswerBody):
    """One token, its log-probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenScore(TokenScore):
    """A token of an answer, with the most probable tokens at its position."""

    top_logprobs: list[TokenScore]


class ChatScores(AnswerBody):
    """Log-probabilities of the chat endpoint."""

    content: list[ChosenScore]
    refusal: None


class AnsweredFunction(AnswerBody):
    """A called function. `arguments` is JSON text."""

    name: str
    arguments: str


class AnsweredCall(AnswerBody):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnsweredMessage(AnswerBody):
    """The assistant's message. `content` is null if there are only calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class ChatChoice(AnswerBody):
    """One answer. `token_ids` is present if requested."""

    index: int
    message: AnsweredMessage
    logprobs: ChatScores | None
    finish_reason: Reason | Literal["tool_calls"]
    token_ids: list[int] | None = None


class ChatCompletion(AnswerBody):
    """Answer of `POST /v1/chat/completions`. The last two fields are present if requested."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class CertificateSummary(AnswerBody):
    """Numbers of checks of `elarge certify` by result, and the names of the failed checks."""

    passed: int
    failed: int
    not_applicable: int
    failed_checks: list[str]


class ModelCard(AnswerBody):
    """A model. The `parent` of a LoRA adapter is its base model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    """null if the model is not loaded and its files do not contain the length."""
    certificate: CertificateSummary | None = None
    """Absent for a model without `certificate.json`."""
    type: Literal["model"] = "model"
    """This field and the next ones are for Anthropic's clients."""
    display_name: str | None = None
    created_at: str | None = None
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None = None


class ModelList(AnswerBody):
    """Answer of `GET /v1/models`."""

    object: Literal["list"]
    data: list[ModelCard]
    first_id: str | None = None
    """This field and the next two are for Anthropic's clients."""
    last_id: str | None = None
    has_more: Literal[False] = False


class NearestPrompt(AnswerBody):
    """The earlier prompt with the most equal tokens at the beginning, with its answer."""

    id: str
    equal_tokens: int
    seconds_before: float


class PrefixUse(AnswerBody):
    """How a prompt used the prefix cache. The texts are those before the first token that differs,
    and from there, in the prompt and in the nearest one."""

    id: str
    prompt_tokens: int
    cached_tokens: int | None
    page_size: int
    nearest: NearestPrompt | None
    text_before: str
    text: str
    nearest_text: str
    reason: str


class PrefixReport(AnswerBody):
    """Answer of `GET /v1/prefix/{id}`: the prompts of a request."""

    object: Literal["list"]
    data: list[PrefixUse]


class TokenizedText(AnswerBody):
    """Answer of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizedText(AnswerBody):
    """Answer of `POST /detokenize`."""

    prompt: str
    content: str
    """llama.cpp's name of `prompt`."""


class HealthState(AnswerBody):
    """Answer of the health endpoints."""

    status: Literal["ok", "down", "draining", "sleeping"]
    reason: str | None = None
    degraded: dict[str, str] | None = None
    """Impaired parts of the server, with the reason; absent if all parts work."""
    programs_pending: int | None = None
    """Number of programs that are compiled in the background; absent if none is."""


class Load(AnswerBody):
    """Answer of `GET /load`: the number of waiting and running requests."""

    server_load: int


class TokenizerInfo(BaseModel):
    """Answer of `GET /tokenizer_info`: the content of `tokenizer_config.json`."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    chat_template: str | None = None


class WeightsUpdate(AnswerBody):
    """Whether the weights were replaced."""

    success: bool
    message: str


class Sleeping(AnswerBody):
    """Answer of `/sleep`, `/wake_up` and `/is_sleeping`."""

    is_sleeping: bool


class Version(AnswerBody):
    """Answer of `GET /version`."""

    version: str
