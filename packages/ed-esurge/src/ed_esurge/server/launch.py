"""Running the application under uvicorn: binding, the one line that says where, draining."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from ed_infra.errors import ConfigError, EasyDeLError
from fastapi import FastAPI
from uvicorn.logging import AccessFormatter, DefaultFormatter

from ed_esurge.config import ServerLimits
from ed_esurge.server.app import create_app
from ed_esurge.server.http.admission import LOOPBACK
from ed_esurge.server.http.auth import ApiKey
from ed_esurge.server.http.connections import connection_class

# Seconds in which the other processes must have heard of the end.
FAREWELL = 30


@contextmanager
def leading(engine: Any) -> Iterator[bool]:
    """Whether this process takes the requests of an engine.

    One that does not has followed the first to its end before the block begins. The first lets the
    others go after the block.

    Args:
        engine: what is served; several by their names.

    Raises:
        ConfigError: there are several engines, and one lies on devices of several processes.
    """
    engines = list(engine.values()) if isinstance(engine, Mapping) else [engine]
    bare = [getattr(one, "engine", one) for one in engines]  # without the thread around it
    roles = [getattr(one, "role", "alone") for one in bare]
    if set(roles) == {"alone"}:
        yield True
        return
    if len(engines) > 1:
        raise ConfigError(
            f"{len(engines)} models cannot be served together over several processes, which take "
            "the steps of one engine: serve one model, or start one process"
        )
    if roles == ["follows"]:
        with _ends_with_the_first():
            bare[0].follow()
        yield False
        return
    try:
        yield True
    finally:
        # In a thread: an engine that hangs in a step must not keep this process.
        farewell = threading.Thread(target=bare[0].terminate, daemon=True)
        farewell.start()
        farewell.join(FAREWELL)
        if farewell.is_alive():
            logger.error("the other processes could not be told to end: the engine hangs")


@contextmanager
def _ends_with_the_first() -> Iterator[None]:
    """Who stops a run signals all of its processes: the others go on until the first has drained.
    A second signal ends them at once."""

    def patient(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        logger.info("this process ends when the first one has; a second signal ends it now")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, patient) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


logger = logging.getLogger(__name__)

# Seconds that requests have to tell their clients that they were given up.
LAST_WORDS = 5


class _Server(uvicorn.Server):
    """uvicorn's server that tells when it accepts, and treats a signal as a wish to end well."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: FastAPI,
        on_ready: Callable[[], None],
        drain_seconds: float,
    ) -> None:
        super().__init__(config)
        self._app = app
        self._on_ready = on_ready
        self._drain_seconds = drain_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.server.state.draining = True
        give_up = self._app.state.server.state.stopping.set
        timer = asyncio.get_running_loop().call_later(self._drain_seconds, give_up)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._app.state.server.state.draining = True
        super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # uvicorn raises the signal again once it has drained, and the process would die of it:
        # a command that was asked to stop, and did, has succeeded.
        with super().capture_signals():
            try:
                yield
            finally:
                self._captured_signals.clear()


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error}): choose another port, or 0 for a free one"
        ) from error
    return listener


def _url(host: str, listener: socket.socket, tls: bool) -> str:
    """Where clients of this machine find the server."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http{'s' if tls else ''}://{shown}:{listener.getsockname()[1]}/v1"


def serve(
    engine: Any,
    host: str = "127.0.0.1",
    port: int = 11556,
    *,
    served_model_name: str | Sequence[str] | None = None,
    api_key: str | ApiKey | Sequence[str | ApiKey] | None = None,
    chat_template: str | None = None,
    cors_origins: Sequence[str] | None = None,
    allowed_hosts: Sequence[str] | None = None,
    limits: ServerLimits | Mapping[str, Any] | None = None,
    enable_function_calling: bool = True,
    tool_parser_name: str = "auto",
    reasoning_parser: str = "auto",
    oai_like_processor: bool = True,
    lora_directory: str | Path | None = None,
    batch_directory: str | Path | None = None,
    otlp_traces_endpoint: str | None = None,
    enable_sleep_mode: bool = False,
    unknown_fields: str = "warn",
    admin_api_key: str | None = None,
    share_prefix_cache: bool = False,
    log_level: str = "warning",
    drain_seconds: int = 30,
    ssl_keyfile: str | None = None,
    ssl_certfile: str | None = None,
) -> None:
    """Serve an engine until SIGTERM or Ctrl-C; then finish what runs, and return.

    Prints one line with the URL once requests are accepted. Where the model lies on devices of
    several processes, each of them calls this: the first serves, the others return after it.

    Args:
        engine: an `eSurge`, or several (see `create_app`, also for the options not listed here).
        host: address to listen on. Anything but the loopback address opens the server to others.
        port: 0 takes a free one.
        log_level: uvicorn's; from `"info"` on, every request is logged.
        allowed_hosts: see `create_app`; None allows this machine's own names where `host` is its
            loopback address, and anything elsewhere.
        drain_seconds: how long running requests may take after the signal; what runs then still is
            told so.
        ssl_keyfile: PEM file of the private key; needs `ssl_certfile`.
        ssl_certfile: PEM file of the certificate.

    Raises:
        ConfigError: the address cannot be had, or one of the two TLS files is missing.
        EasyDeLError: the server could not start.
    """
    with leading(engine) as leads:
        if leads:
            server, listener, url = _prepare(
                engine,
                host,
                port,
                on_ready=lambda: print(f"serving at {url} (Ctrl-C stops)", flush=True),
                log_level=log_level,
                drain_seconds=drain_seconds,
                tls=(ssl_keyfile, ssl_certfile),
                options={
                    "served_model_name": served_model_name,
                    "api_key": api_key,
                    "chat_template": chat_template,
                    "cors_origins": cors_origins,
                    "allowed_hosts": allowed_hosts,
                    "limits": limits,
                    "enable_function_calling": enable_function_calling,
                    "tool_parser_name": tool_parser_name,
                    "reasoning_parser": reasoning_parser,
                    "oai_like_processor": oai_like_processor,
                    "lora_directory": lora_directory,
                    "batch_directory": batch_directory,
                    "otlp_traces_endpoint": otlp_traces_endpoint,
                    "enable_sleep_mode": enable_sleep_mode,
                    "unknown_fields": unknown_fields,
                    "admin_api_key": admin_api_key,
                    "share_prefix_cache": share_prefix_cache,
                },
            )
            if host not in LOOPBACK and not api_key:
                logger.warning("%s is open to whoever can reach it: set api_key to close it", url)
            # Garbage collections stop all threads. They need not visit the objects of the start.
            gc.collect()
            gc.freeze()
            try:
                with _logs():
                    server.run(sockets=[listener])
            except KeyboardInterrupt:  # a second Ctrl-C
                return
            finally:
                listener.close()
            if not server.started:
                raise EasyDeLError("the server could not start; the log above says why")


@contextmanager
def background(
    engine: Any, host: str = "127.0.0.1", port: int = 0, *, drain_seconds: int = 5, **options: Any
) -> Iterator[str]:
    """Serve from a thread while the block runs; gives the URL (for notebooks and tests).

    Args:
        options: as for `create_app`.
    """
    ready = threading.Event()
    server, listener, url = _prepare(
        engine,
        host,
        port,
        on_ready=ready.set,
        log_level="warning",
        drain_seconds=drain_seconds,
        tls=(None, None),
        options=options,
    )

    def run() -> None:
        with _logs():
            server.run(sockets=[listener])

    thread = threading.Thread(target=run, name="ed-esurge-server", daemon=True)
    thread.start()
    try:
        while not ready.wait(0.05):
            if not thread.is_alive():
                raise EasyDeLError("the server could not start; the log above says why")
        yield url
    finally:
        server.should_exit = True
        deadline = time.monotonic() + drain_seconds + LAST_WORDS + 5
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(0.1)
        listener.close()


@contextmanager
def _logs() -> Iterator[None]:
    """Show uvicorn's messages on standard error and its requests on standard output meanwhile."""
    shown = {
        "uvicorn": (sys.stderr, DefaultFormatter("%(levelprefix)s %(message)s")),
        "uvicorn.access": (
            sys.stdout,
            AccessFormatter('%(levelprefix)s %(client_addr)s - "%(request_line)s" %(status_code)s'),
        ),
    }
    added: list[tuple[logging.Logger, logging.Handler]] = []
    for name, (stream, formatter) in shown.items():
        handler = logging.StreamHandler(stream)
        handler.setFormatter(formatter)
        added.append((logging.getLogger(name), handler))
        added[-1][0].addHandler(handler)
        added[-1][0].propagate = False
    try:
        yield
    finally:
        for log, handler in added:
            log.removeHandler(handler)


def _prepare(
    engine: Any,
    host: str,
    port: int,
    *,
    on_ready: Callable[[], None],
    log_level: str,
    drain_seconds: int,
    tls: tuple[str | None, str | None],
    options: dict[str, Any],
) -> tuple[_Server, socket.socket, str]:
    if (tls[0] is None) != (tls[1] is None):
        raise ConfigError("TLS needs both ssl_keyfile and ssl_certfile")
    if options.get("allowed_hosts") is None and host in LOOPBACK:
        options = {**options, "allowed_hosts": LOOPBACK}
    app = create_app(engine, **options)
    listener = _bind(host, port)
    config = uvicorn.Config(
        app,
        http=connection_class(app.state.server.state.limits),
        # Its own configuration would close every handler of the process, whoever made it.
        log_config=None,
        log_level=log_level,
        access_log=log_level in ("info", "debug", "trace"),
        # Clients keep connections in pools; uvicorn's 5 s would cut them just before reuse.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=drain_seconds + LAST_WORDS,
        ws="none",
        server_header=False,
        ssl_keyfile=tls[0],
        ssl_certfile=tls[1],
    )
    server = _Server(config, app, on_ready, drain_seconds)
    return server, listener, _url(host, listener, tls[0] is not None)
