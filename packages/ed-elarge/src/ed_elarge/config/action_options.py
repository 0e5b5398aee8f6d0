"""Options of the actions of a run file. This module imports neither jax nor transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from ed_data.languages import language_code
from ed_esurge.config import ServerLimits, UnknownFields
from ed_esurge.replies.reasoning_formats import REASONING_FORMATS
from ed_esurge.replies.tool_formats import TOOL_FORMATS
from ed_infra.chats import CheckedPrompts
from ed_infra.options import Count, Options, Seed, Whole, choice
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from ed_elarge.config.sections import (
    EvalSection,
    Name,
    Probability,
    Temperature,
)

Secret = Annotated[SecretStr, Field(min_length=1)]


class NoOptions(Options):
    """Options of actions without parameters."""


class WriteOptions(Options):
    """`to_json`, `to_yaml`."""

    path: Name
    """Path of the file; its folder is created."""


class EvalOptions(EvalSection):
    """`eval`: these keys override the section `eval`."""

    engine: Annotated[str, choice("engine", ("auto", "esurge"))] = "auto"
    """The engine; `auto` selects `esurge`."""

    def over(self, section: EvalSection) -> EvalSection:
        """Return the section with the keys of this action."""
        changes = {key: getattr(self, key) for key in self.model_fields_set - {"engine"}}
        return section.replace(**changes)


def _one_or_more(value: object) -> Any:
    return (value,) if isinstance(value, str) else value


class GenerateOptions(Options):
    """`generate`: print completions."""

    ALIASES: ClassVar[Mapping[str, str]] = {"prompt": "prompts", "max_tokens": "max_new_tokens"}

    prompts: Annotated[CheckedPrompts, Field(min_length=1)] | None = None
    """Texts to continue, and conversations to answer (lists of messages with `role` and `content`).
    None: the beginning of a held-out text or chat, or "The"."""
    max_new_tokens: Count = 64
    temperature: Temperature = 0.0
    """0 is greedy."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    """Sample from this number of the likeliest tokens; 0 and -1: from all tokens."""
    top_p: Probability = 1.0
    """Sample from the likeliest tokens whose probabilities sum to this value."""
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Values above 1 reduce the probability of tokens that have occurred."""
    seed: Seed = 0


class TranscribeOptions(Options):
    """`transcribe`: print the texts of recordings, of any length."""

    files: Annotated[tuple[Name, ...], Field(min_length=1), BeforeValidator(_one_or_more)]
    """Paths of recordings: WAV, FLAC, OGG, MP3."""
    language: Annotated[str, AfterValidator(language_code)] | None = None
    """Language of the speech: a code, or an English name. None: the model detects the language.
    Whisper only."""
    task: Annotated[str, choice("task", ("transcribe", "translate"))] = "transcribe"
    """`translate` translates to English. Whisper only."""


class ServeOptions(Options):
    """`serve`: the OpenAI-compatible server, until it is interrupted."""

    ALIASES: ClassVar[Mapping[str, str]] = {"admin_key": "admin_api_key"}

    host: Name = "127.0.0.1"
    """Address of the server; `0.0.0.0` listens on every address of the machine."""
    port: Annotated[int, Field(ge=0, le=65535)] = 11556
    """Port of the server; 0 selects a free port."""
    data_parallel_size: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of replicas of the model, each in its own process. A lost replica is started again.
    1: this process."""
    log_level: Annotated[
        str, choice("log level", ("critical", "error", "warning", "info", "debug", "trace"))
    ] = "info"
    served_model_name: Name | None = None
    """Name of the model in requests. None: the last part of its path, and also `model.name_or_path`
    as it is written, unless it is an absolute path."""
    require_api_key: bool = False
    """Raise an error if neither `api_key` nor `api_key_file` is set."""
    api_key: Annotated[
        Annotated[tuple[Secret, ...], Field(min_length=1)] | None, BeforeValidator(_one_or_more)
    ] = None
    """One API key, or several; each request must contain one of them. None: requests need no key.
    Printed as stars."""
    api_key_file: Name | None = None
    """Further keys: a JSON list of `{"sha256": …}` with the optional keys `name`, `expires`,
    `max_concurrent_requests`, `requests_per_minute` and `admin`."""
    admin_api_key: Secret | None = None
    """Key of the administrative routes (sleep, adapters, reset of the prefix cache). None: on a
    server with keys, these routes require a key of `api_key_file` with `admin`. Printed as
    stars."""
    share_prefix_cache: bool = False
    """Share cached prefixes between API keys. False: each key has separate prefixes, so that
    `cached_tokens` and response times reveal nothing about requests of other clients."""
    enable_function_calling: bool = True
    """False: requests with tools are rejected."""
    tool_parser_name: Annotated[str, choice("tool parser", ("auto", "none", *TOOL_FORMATS))] = (
        "auto"
    )
    """Format of the model's tool calls. `auto`: derived from the chat template."""
    reasoning_parser: Annotated[
        str, choice("reasoning parser", ("auto", "none", *REASONING_FORMATS))
    ] = "auto"
    """Format of the model's reasoning. `auto`: derived from the chat template; `none`: reasoning
    is part of the content."""
    oai_like_processor: bool = True
    """Pass message content to the chat template as a list of parts (OpenAI's format) if the
    template requires it. False: content is always text."""
    enable_cors: bool | None = None
    """Whether pages in a browser may call the server. True without `cors_origins`: pages of every
    origin. None: the pages of `cors_origins`."""
    cors_origins: tuple[str, ...] | None = None
    """Web origins that may call the server from a browser; `["*"]` allows all."""
    allowed_hosts: tuple[Name, ...] | None = None
    """Accepted `Host` headers. None: names of this machine if `host` is a loopback address, and any
    name otherwise."""
    allowed_media_domains: tuple[Name, ...] = ()
    """Hosts from which the server downloads the images of requests. Default: requests contain their
    images as `data:` URLs."""
    lora_directory: Name | None = None
    """Folder of LoRA adapters that clients may load (`/v1/load_lora_adapter`), if the engine has
    `max_loras`. None: clients load no adapters."""
    weights_directory: Name | None = None
    """Folder of checkpoints whose weights administrators may load (`/update_weights_from_disk`).
    None: clients replace no weights."""
    batch_directory: Name | None = None
    """Folder for files and results of `/v1/batches`, which persist between runs of the server.
    None: no batches."""
    mcp_config: Name | None = None
    """JSON file of MCP servers whose tools `/v1/responses` may execute (`ed-esurge[mcp]`). None: no
    servers."""
    otlp_traces_endpoint: Name | None = None
    """URL of a collector for OpenTelemetry spans by OTLP over HTTP (`ed-esurge[otel]`)."""
    enable_sleep_mode: bool = False
    """Allow clients to release the device memory (`POST /sleep`, `/wake_up`)."""
    unknown_fields: UnknownFields = "warn"
    """Unknown request fields: `ignore`, `warn` (in the response header `X-Ignored-Fields` and once
    in the log), or `refuse` with status 400."""
    limits: ServerLimits = ServerLimits()
    """Limits of requests."""
    drain_seconds: Whole = 30
    """Seconds that running requests may continue when the server stops."""
    ssl_keyfile: Name | None = None
    """Private key (PEM); together with `ssl_certfile` the server uses HTTPS."""
    ssl_certfile: Name | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ServeOptions:
        if self.require_api_key and not (self.api_key or self.api_key_file):
            raise ValueError(
                "api_key is not set, and require_api_key needs api_key: the key of the clients"
            )
        if self.enable_cors is False and self.cors_origins:
            raise ValueError("enable_cors is false, and cors_origins lists origins: keep one")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("TLS needs both ssl_keyfile and ssl_certfile")
        return self
