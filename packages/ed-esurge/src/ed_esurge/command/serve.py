"""Serve a model behind an OpenAI-compatible API, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import os

from ed_esurge.command.flags import mapping_of
from ed_esurge.command.load import add_model_arguments, engine_of
from ed_esurge.config import ServerLimits

#: Environment variable with the API key: a command line is read by every user of the machine.
KEY = "ESURGE_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the server, the engine and the model."""
    add_model_arguments(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    group.add_argument("--port", type=int, default=11556, help="0 takes a free one (%(default)s)")
    group.add_argument("--served-model-name", nargs="+", help="what clients call the model")
    group.add_argument("--chat-template", help="a file with a template to use for the tokenizer's")
    group.add_argument(
        "--api-key-file",
        help=f"JSON list of keys, each with a sha256; or set {KEY} to a single key",
    )
    group.add_argument("--cors-origins", nargs="+", help="origins whose pages may ask; * is all")
    group.add_argument("--allowed-hosts", nargs="+", help="what the Host header may name")
    group.add_argument("--tool-parser-name", default="auto", help="default: %(default)s")
    group.add_argument("--reasoning-parser", default="auto", help="default: %(default)s")
    group.add_argument("--log-level", default="info", help="default: %(default)s")
    group.add_argument("--drain-seconds", type=int, default=30, help="default: %(default)s")
    group.add_argument("--ssl-keyfile", help="private key, PEM")
    group.add_argument("--ssl-certfile", help="certificate, PEM")
    group.add_argument("--limits", metavar="JSON", help="see ed_esurge.config.ServerLimits")


def run(values: argparse.Namespace) -> int:
    """Load the model and serve it."""
    from ed_esurge.server import serve
    from ed_esurge.server.auth import read_keys

    limits = ServerLimits(**mapping_of(values.limits, "--limits"))
    key = os.environ.get(KEY)
    keys = read_keys(values.api_key_file) if values.api_key_file else []
    template = None
    if values.chat_template is not None:
        with open(values.chat_template, encoding="utf-8") as file:
            template = file.read()
    serve(
        engine_of(values),
        values.host,
        values.port,
        served_model_name=values.served_model_name,
        api_key=[*keys, *([key] if key else [])] or None,
        chat_template=template,
        cors_origins=values.cors_origins,
        allowed_hosts=values.allowed_hosts,
        limits=limits,
        tool_parser_name=values.tool_parser_name,
        reasoning_parser=values.reasoning_parser,
        log_level=values.log_level,
        drain_seconds=values.drain_seconds,
        ssl_keyfile=values.ssl_keyfile,
        ssl_certfile=values.ssl_certfile,
    )
    return 0
