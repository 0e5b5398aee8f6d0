"""Options of the HTTP server. This module imports neither jax nor a web framework.

The command line, `create_app`, `serve` and the action `serve` of a run file use these classes. A
field is a keyword of `create_app` or `serve`, a flag of `esurge serve`, and a key of a run file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, Self, get_args, runtime_checkable

from ed_infra.errors import ConfigError, refuse_keywords
from ed_infra.options import Options, Whole, choice, explain_error
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    InstanceOf,
    SecretStr,
    StringConstraints,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import SchemaError

from ed_esurge.config import ApiKey, SamplingDefaults, ServerLimits, UnknownFields
from ed_esurge.replies.reasoning_formats import REASONING_FORMATS
from ed_esurge.replies.tool_formats import TOOL_FORMATS
from ed_esurge.server.activity import parse_keep_alive

#: Greatest number of replicas of a model.
MAX_REPLICAS = 4096


def _convert_path(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _convert_single(value: object) -> object:
    single = isinstance(value, str | SecretStr | ApiKey | os.PathLike)
    return (value,) if single or isinstance(value, Mapping) else value


def _get_key_kind(value: object) -> str:
    return "digest" if isinstance(value, Mapping | ApiKey) else "key"


def read_keys(path: str | Path) -> list[ApiKey]:
    """Return the keys of a file: a JSON list of `ApiKey`.

    Raises:
        ConfigError: the file cannot be read, or is not such a list.
    """
    try:
        raw = json.loads(Path(path).read_text("utf-8"))
        return TypeAdapter(Annotated[list[ApiKey], Field(min_length=1)]).validate_python(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the list"
        raise ConfigError(f"api_key_file {path}: {place}: {first['msg']}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"api_key_file {path} cannot be read ({error}): write a JSON list of objects with "
            "sha256 and optionally name, expires, max_concurrent_requests, requests_per_minute, "
            "admin"
        ) from None


def parse_adapters(value: object) -> object:
    """Return name -> directory of entries NAME=PATH.

    Raises:
        ValueError: an entry has another form, or two entries have one name.
    """
    if not isinstance(value, list | tuple):
        return value
    adapters: dict[str, str] = {}
    for entry in value:
        name, path = _read_adapter(entry)
        if not name or not path or name in adapters:
            raise ValueError(f"needs different NAME=PATH entries, got {entry!r}")
        adapters[name] = path
    return adapters


def _read_adapter(entry: object) -> tuple[str, str]:
    """Return the name and the folder of `NAME=PATH`, or of a JSON object as vLLM has it."""
    if isinstance(entry, str) and entry.lstrip().startswith("{"):
        try:
            entry = json.loads(entry)
        except ValueError:
            return "", ""
    if isinstance(entry, dict):
        known = entry.keys() <= {"name", "path", "base_model_name"}
        return (str(entry.get("name", "")), str(entry.get("path", ""))) if known else ("", "")
    name, _, path = entry.partition("=") if isinstance(entry, str) else ("", "", "")
    return name, path


def _check_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        compile_pattern(pattern)
    return patterns


def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """Return a function that finds a regular expression in a text, in linear time.

    Raises:
        ValueError: the expression is invalid, or has look-around or back references.
    """
    try:
        adapter = TypeAdapter(Annotated[str, StringConstraints(pattern=pattern)])
    except SchemaError as error:
        reason = str(error).rpartition("error: ")[2].strip()
        raise ValueError(f"{pattern!r} is no regular expression of Rust: {reason}") from None
    return adapter.validator.isinstance_python


def _check_keep_alive(value: str | float) -> str | float:
    parse_keep_alive(value)
    return value


OptionText = Annotated[str, BeforeValidator(_convert_path), Field(min_length=1)]
OptionTexts = Annotated[tuple[OptionText, ...], BeforeValidator(_convert_single)]
Secret = Annotated[SecretStr, Field(min_length=1)]
LinePatterns = Annotated[OptionTexts, Field(max_length=64), AfterValidator(_check_patterns)]
ServerKey = Annotated[
    Annotated[Secret, Tag("key")] | Annotated[ApiKey, Tag("digest")], Discriminator(_get_key_kind)
]
ServerKeys = Annotated[tuple[ServerKey, ...], Field(min_length=1), BeforeValidator(_convert_single)]
Adapters = Annotated[Mapping[OptionText, OptionText], BeforeValidator(parse_adapters)]


@runtime_checkable
class ModelSource(Protocol):
    """Opens models beside those of the start, such as `ed_esurge.frontends.library.loading`."""

    @property
    def open(self) -> Callable[..., Any]:
        """Function `(server, serve)` that returns the `FurtherModels` of a server.

        `serve` returns the model of an engine.
        """
        ...


class AppOptions(Options):
    """Options of `create_app`."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "admin_key": "admin_api_key",
        "model_dir": "model_directory",
    }

    served_model_name: Annotated[OptionTexts, Field(min_length=1)] | None = None
    """Names of the model in requests. Answers contain the first name. None: the name of the model.
    In a run file, that is the last part of its path, and also `model.name_or_path` as it is
    written, unless it is an absolute path."""
    require_api_key: bool = False
    """Raise an error if neither `api_key` nor `api_key_file` is set."""
    api_key: ServerKeys | None = None
    """One API key, or several; each request must contain one of them. None: requests need no key.
    Printed as stars."""
    api_key_file: OptionText | None = None
    """Further keys: a JSON list of `{"sha256": …}` with the optional keys `name`, `expires`,
    `max_concurrent_requests`, `requests_per_minute` and `admin`."""
    admin_api_key: Secret | None = None
    """Key of the administrative routes (sleep, adapters, reset of the prefix cache). None: on a
    server with keys, these routes require a key of `api_key_file` with `admin`. Printed as
    stars."""
    share_prefix_cache: bool = False
    """Share cached prefixes between API keys. False: each key has separate prefixes, so that
    `cached_tokens` and response times reveal nothing about requests of other clients."""
    chat_template: OptionText | None = None
    """Jinja text that replaces the template of the tokenizer, or the path of a file with it."""
    trust_request_chat_template: bool = False
    """Accept the field `chat_template` of chat requests. These templates run in Jinja's sandbox,
    but can use much processor time and memory."""
    volatile_lines: LinePatterns = ()
    """Regular expressions of lines that change with each request, such as a date. Lines of system
    messages in which one occurs are moved to the end of the last message, so that the tokens before
    it stay in the prefix cache. Syntax of Rust, in linear time."""
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
    generation_config: Annotated[str, choice("source of defaults", ("auto", "none"))] = "auto"
    """Values of sampling options that a request omits. `auto`: those of the model's
    generation_config.json, such as its temperature; `none`: OpenAI's defaults."""
    override_generation_config: SamplingDefaults = SamplingDefaults()
    """Further values of sampling options that a request omits: `temperature`, `top_p`, `top_k`,
    `min_p`, `repetition_penalty`, `presence_penalty`, `frequency_penalty`."""
    oai_like_processor: bool = True
    """Pass message content to the chat template as a list of parts (OpenAI's format) if the
    template requires it. False: content is always text."""
    enable_cors: bool | None = None
    """Whether pages in a browser may call the server. True without `cors_origins`: pages of every
    origin. None: the pages of `cors_origins`."""
    cors_origins: OptionTexts | None = None
    """Web origins that may call the server from a browser; `["*"]` allows all. None: only the
    playground of the server."""
    allowed_hosts: OptionTexts | None = None
    """Accepted `Host` headers, without ports. None: names of this machine if `host` is a loopback
    address, and any name otherwise."""
    allowed_media_domains: OptionTexts = ()
    """Hosts from which the server downloads the images of requests. Default: requests contain their
    images as `data:` URLs."""
    model_directory: OptionText | SkipJsonSchema[InstanceOf[ModelSource]] | None = None
    """Folder of models that are loaded when a request needs them, and where clients store derived
    models. None: only the models of the start."""
    lora_directory: OptionText | None = None
    """Folder of LoRA adapters that clients may load (`/v1/load_lora_adapter`), if the engine has
    `max_loras`. None: clients load no adapters."""
    weights_directory: OptionText | None = None
    """Folder of checkpoints whose weights administrators may load (`/update_weights_from_disk`).
    None: clients replace no weights."""
    batch_directory: OptionText | None = None
    """Folder for files and results of `/v1/batches`, which persist between runs of the server.
    None: no batches."""
    mcp_config: OptionText | None = None
    """JSON file of MCP servers whose tools `/v1/responses` may execute (`ed-esurge[mcp]`). None: no
    servers."""
    otlp_traces_endpoint: OptionText | None = None
    """URL of a collector for OpenTelemetry spans by OTLP over HTTP (`ed-esurge[otel]`)."""
    enable_sleep_mode: bool = False
    """Allow clients to release the device memory (`POST /sleep`, `/wake_up`)."""
    unknown_fields: Annotated[UnknownFields, choice("policy", get_args(UnknownFields))] = "warn"
    """Unknown request fields: `ignore`, `warn` (in the response header `X-Ignored-Fields` and once
    in the log), or `refuse` with status 400."""
    limits: ServerLimits = ServerLimits()
    """Limits of requests."""

    @property
    def browser_origins(self) -> tuple[str, ...] | None:
        """The origins whose pages may call the server; None: only the playground."""
        return ("*",) if self.enable_cors and not self.cors_origins else self.cors_origins

    def with_read_keys(self) -> Self:
        """Return the options with the keys of `api_key_file` in `api_key`, before those of
        `api_key`.

        Raises:
            ConfigError: see `read_keys`.
        """
        if self.api_key_file is None:
            return self
        keys = [*read_keys(self.api_key_file), *(self.api_key or ())]
        return self.replace(api_key=keys, api_key_file=None)

    @classmethod
    def merge(cls, call: str, options: AppOptions | None, keywords: Mapping[str, object]) -> Self:
        """Return the options of a call with a record and keywords. None is the default of a field.

        Args:
            call: name of the public function.
            options: a record, also with further fields; keywords have precedence.
            keywords: the keywords of the call.

        Raises:
            KeywordError: a keyword is unknown.
            ConfigError: a value is invalid.
        """
        refuse_keywords(call, keywords, [*cls.model_fields, *cls.ALIASES])
        values: dict[str, object] = {}
        if options is not None:
            for name in options.model_fields_set & cls.model_fields.keys():
                values[name] = getattr(options, name)
        explicit = {name: value for name, value in keywords.items() if value is not None}
        for name in explicit:
            values.pop(cls.ALIASES.get(name, name), None)
        try:
            return cls.model_validate(values | explicit)
        except ValidationError as error:
            raise ConfigError(explain_error(error)) from None

    @model_validator(mode="after")
    def _access_is_consistent(self) -> Self:
        if self.require_api_key and not (self.api_key or self.api_key_file):
            raise ValueError(
                "api_key is not set, and require_api_key needs api_key: the key of the clients"
            )
        if self.enable_cors is False and self.cors_origins:
            raise ValueError("enable_cors is false, and cors_origins lists origins: keep one")
        return self


class ListenOptions(AppOptions):
    """Options of `serve`: those of `create_app`, and those of the process that listens."""

    host: OptionText = "127.0.0.1"
    """Address of the server; `0.0.0.0` listens on every address of the machine."""
    port: Annotated[int, Field(ge=0, le=65535)] = 11556
    """Port of the server; 0 selects a free port."""
    log_level: Annotated[
        str, choice("log level", ("critical", "error", "warning", "info", "debug", "trace"))
    ] = "info"
    """Least severe messages of the log. From `info` on, the log contains every request."""
    drain_seconds: Whole = 30
    """Seconds that running requests may continue when the server stops."""
    ssl_keyfile: OptionText | None = None
    """Private key (PEM); together with `ssl_certfile` the server uses HTTPS."""
    ssl_certfile: OptionText | None = None
    """Certificate (PEM)."""

    @model_validator(mode="after")
    def _certificate_is_complete(self) -> Self:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("TLS needs both ssl_keyfile and ssl_certfile")
        return self


class ServerOptions(ListenOptions):
    """All options of a server: those of `serve`, and those that describe its models.

    `esurge serve` and the action `serve` of a run file load the models.
    """

    also: OptionTexts = ()
    """More models for the same server, such as an embedding model or Whisper: directories or hub
    ids. The other options are those of the first model. Each model gets an equal share of the
    memory for pages."""
    lora_modules: Adapters = Field(default_factory=dict)
    """LoRA adapters that requests select by name as their model: names and folders. The engine gets
    `max_loras` for them if that option is not set."""
    model_memory: Annotated[float, Field(gt=0, le=2**20)] | None = None
    """Memory of the models of `model_directory`, in GiB: weights and pages. None: no limit."""
    keep_alive: Annotated[str | float, AfterValidator(_check_keep_alive)] = "5m"
    """Time without requests after which a model of `model_directory` is unloaded: seconds, or text
    such as `30s` or `1h`. -1: never."""
    data_parallel_size: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 1
    """Number of replicas of each model, each in its own process. A lost replica is started again.
    1: this process."""
    data_parallel_size_local: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] | None = None
    """Number of replicas on this host; the command `join` starts the others. None: all."""
    data_parallel_address: OptionText = "127.0.0.1"
    """Address of this host at which replicas connect."""
    data_parallel_rpc_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port at which replicas connect; 0 selects a free port."""

    @property
    def replicated(self) -> bool:
        """Whether replicas in other processes serve the models."""
        return self.data_parallel_size > 1 or self.data_parallel_size_local is not None

    @model_validator(mode="after")
    def _models_are_consistent(self) -> Self:
        if self.also and self.served_model_name:
            raise ValueError(
                "served_model_name requires one model: with `also`, each model has its own name"
            )
        if self.also and self.lora_modules:
            raise ValueError("lora_modules requires one model: leave `also` out")
        if self.model_memory is not None and self.model_directory is None:
            raise ValueError("model_memory requires model_directory")
        local = self.data_parallel_size_local
        if local is not None and local > self.data_parallel_size:
            raise ValueError(
                f"data_parallel_size_local {local} must be from 0 to data_parallel_size "
                f"{self.data_parallel_size}"
            )
        if self.model_directory is not None and (self.data_parallel_size > 1 or local == 0):
            raise ValueError(
                "data_parallel_size requires models that each replica loads at its start: name "
                "further models with `also` instead of model_directory"
            )
        return self
