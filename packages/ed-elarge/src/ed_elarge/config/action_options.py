"""What follows an action in a run file: one class for each action that takes options.

As in `ed_elarge.config.sections`, nothing here imports jax or transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from ed_esurge.config import ServerLimits, UnknownFields
from ed_esurge.replies.formats import REASONING_FORMATS, TOOL_FORMATS
from ed_infra.chats import Prompts
from ed_infra.options import Options, choice
from pydantic import BeforeValidator, Field, SecretStr, model_validator

from ed_elarge.config.sections import (
    EvalSection,
    Name,
    NotNegative,
    Positive,
    Probability,
    Seed,
    Temperature,
)

Secret = Annotated[SecretStr, Field(min_length=1)]


class NoOptions(Options):
    """Actions that take none."""


class WriteOptions(Options):
    """`to_json`, `to_yaml`."""

    path: Name
    """Where the configuration is written; folders are made."""


class EvalOptions(EvalSection):
    """`eval`: what stands here goes before the section `eval`."""

    engine: Annotated[str, choice("engine", ("auto", "esurge"))] = "auto"
    """eSurge is the only engine there is; `auto` takes it."""

    def over(self, section: EvalSection) -> EvalSection:
        """The section with the keys of this action on top."""
        own = {key: getattr(self, key) for key in self.model_fields_set - {"engine"}}
        return section.replace(**own)


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class GenerateOptions(Options):
    """`generate`: print completions."""

    ALIASES: ClassVar[Mapping[str, str]] = {"prompt": "prompts", "max_tokens": "max_new_tokens"}

    prompts: Annotated[Prompts, Field(min_length=1)] | None = None
    """Texts that the model continues, and conversations (lists of messages with `role` and
    `content`) that the model answers. None: the beginning of a held-out text or chat, or "The"."""
    max_new_tokens: Positive = 64
    temperature: Temperature = 0.0
    """0 is greedy."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    """Sample among so many of the likeliest tokens; 0 and -1: among all."""
    top_p: Probability = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Above 1, tokens that have occurred become less likely."""
    seed: Seed = 0


class ServeOptions(Options):
    """`serve`: the OpenAI-compatible server, until it is interrupted."""

    host: Name = "127.0.0.1"
    """Address to listen on; `0.0.0.0` is every address of the machine."""
    port: Annotated[int, Field(ge=0, le=65535)] = 11556
    """0 takes a free one."""
    log_level: Annotated[
        str, choice("log level", ("critical", "error", "warning", "info", "debug", "trace"))
    ] = "info"
    served_model_name: Name | None = None
    """What clients call the model; None: the last part of its path."""
    require_api_key: bool = False
    """Refuse to start without `api_key` or `api_key_file`."""
    api_key: Annotated[
        Annotated[tuple[Secret, ...], Field(min_length=1)] | None, BeforeValidator(_one_or_more)
    ] = None
    """The key, or several, one of which each request must bring; None: anybody may ask. Printed as
    stars."""
    api_key_file: Name | None = None
    """More keys: a JSON list of `{"sha256": …}` with, if wanted, `name`, `expires`,
    `max_concurrent_requests`, `requests_per_minute` and `admin`."""
    admin_api_key: Secret | None = None
    """The key of the administrative routes (sleep, adapters, resetting the prefix cache). None: on
    a server with keys, only keys of `api_key_file` with `admin` open these routes. Printed as
    stars."""
    share_prefix_cache: bool = False
    """API keys share cached prefixes. False: each key has its own, so that no client learns from
    `cached_tokens` or from the time of an answer what others have sent."""
    enable_function_calling: bool = True
    """False: requests with tools are refused."""
    tool_parser_name: Annotated[str, choice("tool parser", ("auto", "none", *TOOL_FORMATS))] = (
        "auto"
    )
    """How the model writes calls of tools. `auto`: its chat template tells."""
    reasoning_parser: Annotated[
        str, choice("reasoning parser", ("auto", "none", *REASONING_FORMATS))
    ] = "auto"
    """How the model writes its thoughts. `auto`: its chat template tells; `none`: thoughts stay in
    the content."""
    oai_like_processor: bool = True
    """Give messages to the chat template in OpenAI's shape, content as a list of parts, where the
    template reads no other. False: content is always text."""
    cors_origins: tuple[str, ...] | None = None
    """Web origins whose pages may call the server; `["*"]` is all."""
    allowed_hosts: tuple[Name, ...] | None = None
    """What the `Host` header of a request may name. None: this machine's own names where `host` is
    its loopback address, and anything elsewhere."""
    lora_directory: Name | None = None
    """Clients may load the LoRA adapters below it (`/v1/load_lora_adapter`), where the engine has
    `max_loras`. None: they load none."""
    batch_directory: Name | None = None
    """Where the files and results of `/v1/batches` lie, over the end of the server. None: there are
    no batches."""
    otlp_traces_endpoint: Name | None = None
    """URL of a collector that takes OpenTelemetry's spans by OTLP over HTTP (`ed-esurge[otel]`)."""
    enable_sleep_mode: bool = False
    """Clients may lend the memory of the device to others (`POST /sleep`, `/wake_up`)."""
    unknown_fields: UnknownFields = "warn"
    """Request fields that the server does not know: `ignore`, `warn` (the header `X-Ignored-Fields`
    of the answer names the fields, and the log does once), or `refuse` with status 400."""
    limits: ServerLimits = ServerLimits()
    """How much clients may ask for."""
    drain_seconds: NotNegative = 30
    """How long running requests may take once the server is to stop."""
    ssl_keyfile: Name | None = None
    """Private key, PEM; with `ssl_certfile` the server speaks HTTPS."""
    ssl_certfile: Name | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ServeOptions:
        if self.require_api_key and not (self.api_key or self.api_key_file):
            raise ValueError(
                "api_key is not set, and require_api_key needs api_key: the key that clients bring"
            )
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("TLS needs both ssl_keyfile and ssl_certfile")
        return self
