"""Request models of the OpenAI endpoints.

A known field without an implementation is accepted if it cannot change the answer (`user`,
`metadata`, `store`, ...). A `reject_field` field is an error that suggests an alternative. Unknown
keys follow the option `unknown_fields` of the server. Fields marked *extension* are vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, PrivateAttr, model_validator

from ed_esurge.sampling import MAX_BAD_WORDS, MAX_LISTED, Word
from ed_esurge.server.generation.content_parts import (
    OMITTED_MEDIUM,
    PART_TYPES,
    ContentParts,
    MediumPart,
    TextPart,
    convert_part,
)
from ed_esurge.server.generation.structured import (
    MAX_TOOL_CALLS,
    Guided,
    NamedTool,
    ResponseFormat,
    ToolCall,
    ToolChoice,
    Tools,
    with_allowed_tools,
)
from ed_esurge.server.http.errors import InvalidField
from ed_esurge.server.http.fields import (
    ClientData,
    ClientText,
    History,
    LlamaSamplers,
    Metadata,
    RequestBody,
    Stops,
    TokenIds,
    check_part_types,
    few,
    reject_field,
)

# Fields for structured output.
_GUIDES = frozenset(Guided.model_fields)


class OtherSamplers(RequestBody):
    """Sampling fields of vLLM, SGLang, llama.cpp and text-generation-inference."""

    use_beam_search: bool = False
    """Whether the `n` choices are the best beams of a beam search with `n` beams."""
    length_penalty: Annotated[float, Field(ge=-100, le=100)] = 1.0
    """Exponent of the length in the score of a beam."""
    early_stopping: Annotated[
        None, reject_field("a beam search that stops early; request fewer tokens", False)
    ] = None
    logits_processors: Annotated[
        None, reject_field("code of clients; send logit_bias, allowed_token_ids or bad_words", [])
    ] = None
    custom_logit_processor: Annotated[
        None, reject_field("code of clients; send logit_bias, allowed_token_ids or bad_words")
    ] = None
    repetition_detection: Annotated[
        None, reject_field("repetition_detection; send repetition_penalty")
    ] = None
    kv_transfer_params: Annotated[None, reject_field("transfers of pages between servers", {})] = (
        None
    )
    vllm_xargs: Annotated[None, reject_field("vllm_xargs; send the fields of this API", {})] = None
    guided_whitespace_pattern: Annotated[None, reject_field("send guided_grammar")] = None
    tfs_z: Annotated[None, reject_field("tail-free sampling; send min_p", 1, 1.0)] = None
    top_a: Annotated[None, reject_field("top-a; send min_p", 0, 0.0)] = None
    dynatemp_range: Annotated[None, reject_field("dynamic temperatures", 0, 0.0)] = None
    repeat_last_n: Annotated[
        None, reject_field("the penalties read all tokens; send repeat_last_n -1", -1)
    ] = None
    samplers: Annotated[
        None, reject_field("the order of the samplers is fixed; omit unused samplers")
    ] = None
    repeat_penalty: Annotated[None, reject_field("send repetition_penalty", 1, 1.0)] = None


class OtherTemplates(RequestBody):
    """Fields of vLLM's chat requests about the chat template."""

    prompt_embeds: Annotated[
        None, reject_field("embeddings in a conversation; use /v1/completions", [])
    ] = None
    mm_processor_kwargs: Annotated[None, reject_field("options of the processor", {})] = None
    echo: Annotated[None, reject_field("echo of a conversation; use /v1/completions", False)] = None
    add_special_tokens: Annotated[None, reject_field("the chat template adds them", False)] = None
    best_of: Annotated[None, reject_field("best_of of a conversation; send n", 1)] = None


#: Amount of thinking, in the terms of OpenAI and Anthropic.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

MAX_LOGPROBS = 20
# Limits of the items of a request, which are examined one by one.
MAX_MESSAGES, MAX_PROMPTS, MAX_PARTS, MAX_DOCUMENTS = 4096, 2048, 1024, 256
MAX_BIASES, MAX_STOP_TOKENS = 1024, 1024


def validate_prompts(value: object) -> list[str | list[int]]:
    """Convert the four forms of `prompt` to a list of texts and token lists; None to []."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise InvalidField("must be text, a list of texts, a list of token ids, or a list of those")
    if all(type(item) is int for item in value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise InvalidField(f"has {len(value)} items, and the limit of this server is {MAX_PROMPTS}")
    for place, item in enumerate(value):
        tokens = isinstance(item, list) and item and all(type(token) is int for token in item)
        if not (isinstance(item, str) or tokens):
            raise InvalidField(f"item {place} is neither text nor a non-empty list of token ids")
    return value


def as_list(value: object) -> object:
    """Convert one text to a list of texts."""
    return [value] if isinstance(value, str) else value


def _bias(value: object) -> object:
    """Parse the token ids, which are JSON keys and therefore strings."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASES:
        raise InvalidField(f"has {len(value)} items, and the limit of this server is {MAX_BIASES}")
    result = {}
    for key, bias in value.items():
        if not (len(key) < 20 and _is_number(key)):
            raise InvalidField(f"{key!r} is not a token id; POST /tokenize returns token ids")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise InvalidField(f"{bias!r} for token {key} is not within [-100, 100]")
        result[int(key)] = float(bias)
    return result or None


def _is_number(key: str) -> bool:
    try:
        int(key)
    except ValueError:
        return False
    return True


_LogitBias = Annotated[dict[int, float] | None, BeforeValidator(_bias)]


class StreamOptions(RequestBody):
    """Additional content of a stream.

    Attributes:
        include_usage: whether a last chunk without choices contains the token counts.
        continuous_usage_stats: with `include_usage`, whether every chunk contains the token counts
            so far (extension).
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None


class GenerationRequest(Guided, LlamaSamplers, OtherSamplers):
    """The common fields of the generation endpoints, with OpenAI's defaults."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stop: Stops = Field(default_factory=list)
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: _LogitBias = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    # Extensions.
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(ge=1e-3, le=1e3)] = None

    min_tokens: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    stop_token_ids: Annotated[TokenIds | None, few(MAX_STOP_TOKENS)] = None
    allowed_token_ids: Annotated[TokenIds | None, few(MAX_LISTED)] = None
    bad_words: Annotated[list[Word] | None, few(MAX_BAD_WORDS)] = None
    forced_bos_token_id: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """Whether log-probabilities name tokens as `token_id:5`."""
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=1024)] = None
    request_id: Annotated[str | None, Field(pattern=r"^[\x21-\x7e]{1,128}$")] = None

    # Fields about billing and storage, which do not change the answer.
    user: ClientText | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: ClientText | None = None
    safety_identifier: ClientText | None = None
    prompt_cache_key: ClientText | None = None
    prompt_cache_retention: ClientText | None = None
    prompt_cache_options: ClientData | None = None

    @model_validator(mode="after")
    def _options_need_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise InvalidField("requires stream: true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidField(
                "are not available in streams: omit stream or them", "prompt_logprobs"
            )
        if self.use_beam_search and self.stream:
            raise InvalidField(
                "ends before its first token is known: omit stream", "use_beam_search"
            )
        if self.length_penalty != 1.0 and not self.use_beam_search:
            raise InvalidField("requires use_beam_search: true", "length_penalty")
        if self.truncate_prompt_tokens == 0:
            raise InvalidField(
                "0 would remove the entire prompt; -1 keeps as many tokens as fit",
                "truncate_prompt_tokens",
            )
        if self.bad_words is not None and "" in self.bad_words:
            raise InvalidField("an empty string is part of every text: omit it", "bad_words")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidField("is empty: no token could be sampled", "allowed_token_ids")
        return self

    @property
    def is_guided(self) -> bool:
        """Whether the request has a field for structured output; see `outputs`."""
        return not self.model_fields_set.isdisjoint(_GUIDES)

    @property
    def include_usage(self) -> bool:
        """Whether the last chunk of a stream contains the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream contains the token counts so far."""
        options = self.stream_options
        return self.include_usage and options is not None and options.continuous_usage_stats


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`. `prompt` is converted to a list."""

    prompt: Annotated[list[str | list[int]], PlainValidator(validate_prompts)] = Field(
        default_factory=list
    )
    prompt_embeds: Annotated[list[str], BeforeValidator(as_list), few(MAX_PROMPTS)] = Field(
        default_factory=list
    )
    """Prompts of embeddings, before those of `prompt`: safetensors files in base64 (extension)."""
    max_tokens: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    echo: bool = False
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    best_of: Annotated[int | None, Field(ge=1, le=128)] = None
    add_special_tokens: bool = True  # extension
    thinking_token_budget: Annotated[
        None, reject_field("a completion has no thoughts; use /v1/chat/completions", -1)
    ] = None
    suffix: Annotated[
        None,
        reject_field(
            "a causal language model continues a text and cannot fill in before a suffix; "
            "put the text that follows into the prompt, or drop `suffix`",
            "",
        ),
    ] = None

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if not self.prompt and not self.prompt_embeds:
            is_present = "prompt" in self.model_fields_set
            raise InvalidField(
                "is missing or empty: send text, token ids, or prompt_embeds",
                "prompt",
                code=None if is_present else "missing_required_parameter",
            )
        if self.prompt_embeds:
            for name in ("echo", "truncate_prompt_tokens", "use_beam_search", "prompt_logprobs"):
                if getattr(self, name) not in (None, False):
                    raise InvalidField("needs token ids: omit it, or omit prompt_embeds", name)
        if self.max_tokens == 0 and not self.echo:
            raise InvalidField("0 generates no token and requires echo: true", "max_tokens")
        if self.use_beam_search and self.best_of not in (None, self.n):
            raise InvalidField("has no effect on beam search: omit it", "best_of")
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidField(f"{self.best_of} is below n ({self.n})", "best_of")
        if self.stream and (self.best_of or self.n) > self.n:
            raise InvalidField(
                "a value above n selects completions at the end and cannot stream: omit one of "
                "both",
                "best_of",
            )
        return self


class ChatMessage(History):
    """One chat message. The message of an answer is a valid message as well."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | ContentParts | None,
        check_part_types(*PART_TYPES),
        few(MAX_PARTS),
    ] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, few(MAX_TOOL_CALLS)] = None
    tool_call_id: Annotated[str | None, Field(max_length=256)] = None
    reasoning_content: str | None = None  # extension
    function_call: Annotated[None, reject_field("function calls; send tool_calls")] = None
    audio: Annotated[None, reject_field("audio")] = None

    @model_validator(mode="before")
    @classmethod
    def _reasoning(cls, data: object) -> object:
        """Read the alias `reasoning` of `reasoning_content` if it is text."""
        if not isinstance(data, Mapping) or data.get("reasoning_content") is not None:
            return data
        thoughts = data.get("reasoning")
        return {**data, "reasoning_content": thoughts} if isinstance(thoughts, str) else data

    @model_validator(mode="after")
    def _consistent(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise InvalidField("only messages of the assistant have calls", "tool_calls")
        if self.role == "tool" and self.tool_call_id is None:
            raise InvalidField("is missing: a result requires the id of its call", "tool_call_id")
        return self

    def replace_optional_media(self) -> Self:
        """Return the message with a note instead of each optional image or recording."""
        if not isinstance(self.content, list):
            return self
        content = [
            TextPart(type="text", text=OMITTED_MEDIUM)
            if isinstance(part, MediumPart) and part.is_optional
            else part
            for part in self.content
        ]
        return self.model_copy(update={"content": content})

    def for_template(self) -> dict[str, Any]:
        """Return the message for `ed_infra.conversation`, which prepares it for the template.

        The parts of images, videos and recordings have no content.
        """
        message = self.model_dump(exclude_none=True, exclude={"content"})
        if isinstance(self.content, list):
            message["content"] = [convert_part(part) for part in self.content]
        elif self.content is not None:
            message["content"] = self.content
        return message


ChatMessages = Annotated[list[ChatMessage], Field(fail_fast=True), few(MAX_MESSAGES)]


class ChatRequest(GenerationRequest, OtherTemplates):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[ChatMessages, Field(min_length=1)]
    max_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    logprobs: bool = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None

    # Extensions.
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Annotated[str | None, Field(min_length=1, max_length=2**16)] = None
    """A Jinja template for this request, if the server has `trust_request_chat_template`."""
    documents: Annotated[list[dict[str, Any]], few(MAX_DOCUMENTS)] = Field(default_factory=list)
    """Documents for a chat template that renders documents."""
    include_reasoning: bool = True
    """Whether the answer contains the thoughts of the model."""
    thinking_token_budget: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    """Maximum number of tokens of the thoughts; -1 = no limit."""

    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool = True
    functions: Annotated[None, reject_field("functions; send tools", [])] = None
    function_call: Annotated[None, reject_field("functions; send tool_choice", "none", "auto")] = (
        None
    )
    response_format: ResponseFormat | None = None
    modalities: Annotated[None, reject_field("this model answers with text only", ["text"])] = None
    audio: Annotated[None, reject_field("audio output")] = None
    reasoning_effort: Effort | None = None
    moderation: Annotated[None, reject_field("moderation")] = None
    verbosity: Annotated[
        None, reject_field("verbosity; ask for a length in a message", "medium")
    ] = None
    web_search_options: Annotated[None, reject_field("web search")] = None
    # A hint about the expected answer that only affects the speed.
    prediction: object = None

    _effort_is_hint: bool = PrivateAttr(default=False)

    @property
    def effort_is_hint(self) -> bool:
        """Whether a template without variables for thinking ignores `reasoning_effort`."""
        return self._effort_is_hint

    def with_effort_as_hint(self) -> Self:
        """Return the request with `effort_is_hint`, as other APIs define the effort."""
        self._effort_is_hint = True
        return self

    @model_validator(mode="before")
    @classmethod
    def _filter_allowed_tools(cls, data: object) -> object:
        if not isinstance(data, Mapping) or not isinstance(data.get("tool_choice"), Mapping):
            return data
        return with_allowed_tools(data)

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidField("requires logprobs: true", "top_logprobs")
        limits = self.max_tokens, self.max_completion_tokens
        if None not in limits and limits[0] != limits[1]:
            raise InvalidField(
                f"{limits[0]} differs from max_completion_tokens {limits[1]}: send one of both",
                "max_tokens",
            )
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise InvalidField("requires tools", "tool_choice")
        if isinstance(self.tool_choice, NamedTool):
            names = [tool.function.name for tool in self.tools]
            if self.tool_choice.function.name not in names:
                raise InvalidField(
                    f"{self.tool_choice.function.name!r} is not among the tools: {names}",
                    "tool_choice",
                )
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise InvalidField("requires a last message of the assistant", "continue_final_message")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidField("requires add_generation_prompt: false", "continue_final_message")
        return self


class TokenizeRequest(RequestBody):
    """Body of `POST /tokenize`: `prompt`, the `messages` of a chat request, or `content`."""

    ALIASES: ClassVar[Mapping[str, str]] = {"add_special": "add_special_tokens"}

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    """llama.cpp's name of `prompt`; special tokens are then added only with `add_special`."""
    messages: Annotated[
        Annotated[list[ChatMessage], Field(fail_fast=True)] | None, few(MAX_MESSAGES)
    ] = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    parse_special: Annotated[
        None, reject_field("special tokens in a text are always read", True)
    ] = None
    with_pieces: Annotated[None, reject_field("pieces; send return_token_strs", False)] = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        inputs = [self.prompt, self.messages, self.content]
        if inputs.count(None) != 2:
            raise InvalidField("send either `prompt` or `messages`", "prompt")
        return self

    @property
    def adds_special_tokens(self) -> bool:
        """Whether the special tokens at the beginning and the end are added to a text."""
        if self.content is not None and "add_special_tokens" not in self.model_fields_set:
            return False
        return self.add_special_tokens


class DetokenizeRequest(RequestBody):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds
