"""Run the application under uvicorn: listen, print the URL, drain."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Unpack

import uvicorn
from ed_infra.errors import ConfigError, EasyDeLError, refuse_keywords
from ed_infra.garbage import settle
from starlette.applications import Starlette
from uvicorn.logging import AccessFormatter, DefaultFormatter

from ed_esurge.engine.transport import follow_all
from ed_esurge.server.app import AppOptions, Engines, create_app
from ed_esurge.server.http.admission import LOOPBACK
from ed_esurge.server.http.connections import (
    SEND_BUFFER,
    ConnectionSlots,
    connection_class,
    most_connections,
)
from ed_esurge.server.http.handshakes import TlsListener

logger = logging.getLogger(__name__)

# Time limits in seconds: to notify the other processes of the end, and to send an error to the
# clients of aborted requests.
NOTIFY_SECONDS, ABORT_SECONDS = 30, 5
# Seconds after which the objects of the first requests are excluded from garbage collections.
SETTLING_SECONDS = 5


@contextmanager
def leading(engine: Engines) -> Iterator[bool]:
    """Yield whether this process accepts the requests of an engine.

    A process that does not accept requests runs the steps of the first process to its end, before
    the block begins. After the block, the first process ends the others.

    Args:
        engine: the served engine, or several engines by name.

    Raises:
        ConfigError: only some of the engines use devices of several processes.
    """
    engines = list(engine.values()) if isinstance(engine, Mapping) else [engine]
    # An `AsyncEngine` has the attribute `engine`.
    bare: list[Any] = [getattr(one, "engine", one) for one in engines]
    roles = [getattr(one, "role", "alone") for one in bare]
    if set(roles) == {"alone"}:
        yield True
        return
    if "alone" in roles:
        raise ConfigError(
            "some of the models use devices of several processes, and others do not: give all "
            "models a mesh over the devices of all processes, or start one process"
        )
    if "follows" in roles:
        with _ends_after_the_first():
            follow_all([(one.transport, one.loop) for one in bare])
        yield False
        return
    try:
        yield True
    finally:
        # In a thread, because an engine that hangs in a step must not block this process.
        notice = threading.Thread(target=_terminate, args=(bare,), daemon=True)
        notice.start()
        notice.join(NOTIFY_SECONDS)
        if notice.is_alive():
            logger.error("the other processes could not be notified of the end: the engine hangs")


def _terminate(engines: Sequence[Any]) -> None:
    for engine in engines:
        engine.terminate()


@contextmanager
def _ends_after_the_first() -> Iterator[None]:
    """Ignore the first signal, because the first process receives it as well and drains.

    A second signal ends this process immediately.
    """

    def on_signal(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        logger.info("this process ends after the first process; a second signal ends it now")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handlers = {
        number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


class _Server(uvicorn.Server):
    """uvicorn's server with a callback for the start, and a graceful end after a signal."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: Starlette,
        on_ready: Callable[[], None],
        drain_seconds: float,
        slots: ConnectionSlots,
    ) -> None:
        super().__init__(config)
        self._app = app
        self._slots = slots
        self._on_ready = on_ready
        self._drain_seconds = drain_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.is_ssl:
            await super().startup([])
            for listener in sockets or ():
                self.servers.append(self._listen_with_tls(listener))
        else:
            await super().startup(sockets)
        if self.started:
            self._on_ready()

    def _listen_with_tls(self, listener: socket.socket) -> Any:
        config = self.config
        assert config.ssl is not None, "uvicorn loads the certificate before the start"

        def build_protocol() -> asyncio.Protocol:
            kind: Any = config.http_protocol_class
            state = self.server_state
            return kind(config=config, server_state=state, app_state=self.lifespan.state)

        seconds = self._app.state.server.state.limits.body_timeout
        server = TlsListener(listener, config.ssl, build_protocol, self._slots, seconds)
        server.start(config.backlog)
        return server

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.server.state.draining = True
        give_up = self._app.state.server.state.stopping.set
        timer = asyncio.get_running_loop().call_later(self._drain_seconds, give_up)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._app.state.server.state.draining = True
        super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # uvicorn raises the signal again after the drain, which would end the process with an
        # error. A command that stops after a signal has succeeded.
        with super().capture_signals():
            try:
                yield
            finally:
                self._captured_signals.clear()


def _bind(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # of its connections
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error}): choose another port, or 0 for a free one"
        ) from error
    return listener


def _url(host: str, listener: socket.socket, tls: bool) -> str:
    display_host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(
        host, f"[{host}]" if ":" in host else host
    )
    return f"http{'s' if tls else ''}://{display_host}:{listener.getsockname()[1]}/v1"


def serve(
    engine: Engines,
    host: str = "127.0.0.1",
    port: int = 11556,
    *,
    log_level: str = "warning",
    drain_seconds: int = 30,
    ssl_keyfile: str | None = None,
    ssl_certfile: str | None = None,
    **options: Unpack[AppOptions],
) -> None:
    """Serve an engine until SIGTERM or Ctrl-C. Return after the running requests are finished.

    Prints one line with the URL when the server accepts requests. If the model uses devices of
    several processes, every process calls this function: the first process serves, and the others
    return after it.

    Args:
        engine: an `eSurge`, or several, see `create_app`.
        host: address to listen on. Other machines can reach any address but the loopback address.
        port: 0 selects a free port.
        log_level: log level of uvicorn; from `"info"` on, every request is logged.
        drain_seconds: time limit of the running requests after the signal. The server
            aborts slower requests with an error.
        ssl_keyfile: PEM file of the private key; requires `ssl_certfile`.
        ssl_certfile: PEM file of the certificate.
        options: options of `create_app`. `allowed_hosts=None` allows only the names of this machine
            if `host` is the loopback address, and any name otherwise.

    Raises:
        ConfigError: the address is not available, or one of the two TLS files is missing.
        EasyDeLError: the server could not start.
    """
    with leading(engine) as leads:
        if leads:
            server, listener, url = _prepare(
                engine,
                host,
                port,
                on_ready=lambda: _announce(url),
                log_level=log_level,
                drain_seconds=drain_seconds,
                tls=(ssl_keyfile, ssl_certfile),
                options=options,
            )
            if host not in LOOPBACK and not options.get("api_key"):
                logger.warning("%s accepts requests without a key: set api_key to require one", url)
            try:
                with _logs():
                    server.run(sockets=[listener])
            except KeyboardInterrupt:  # a second Ctrl-C
                return
            finally:
                listener.close()
            if not server.started:
                raise EasyDeLError("the server could not start; see the log above")


def _announce(url: str) -> None:
    settle()
    print(f"serving at {url} (Ctrl-C stops)", flush=True)
    cleaner = threading.Timer(SETTLING_SECONDS, settle)
    cleaner.daemon = True
    cleaner.start()


@contextmanager
def background(
    engine: Engines,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    drain_seconds: int = 5,
    ssl_keyfile: str | None = None,
    ssl_certfile: str | None = None,
    **options: Unpack[AppOptions],
) -> Iterator[str]:
    """Serve from a thread during the block. Yields the URL (for notebooks and tests).

    Args:
        ssl_keyfile, ssl_certfile: see `serve`.
        options: options of `create_app`.
    """
    ready = threading.Event()
    server, listener, url = _prepare(
        engine,
        host,
        port,
        on_ready=ready.set,
        log_level="warning",
        drain_seconds=drain_seconds,
        tls=(ssl_keyfile, ssl_certfile),
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
                raise EasyDeLError("the server could not start; see the log above")
        yield url
    finally:
        server.should_exit = True
        deadline = time.monotonic() + drain_seconds + ABORT_SECONDS + 5
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(0.1)
        listener.close()


@contextmanager
def _logs() -> Iterator[None]:
    """Write uvicorn's messages to standard error, and its requests to standard output."""
    log_targets = {
        "uvicorn": (sys.stderr, DefaultFormatter("%(levelprefix)s %(message)s")),
        "uvicorn.access": (
            sys.stdout,
            AccessFormatter('%(levelprefix)s %(client_addr)s - "%(request_line)s" %(status_code)s'),
        ),
    }
    added: list[tuple[logging.Logger, logging.Handler]] = []
    for name, (stream, formatter) in log_targets.items():
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
    engine: Engines,
    host: str,
    port: int,
    *,
    on_ready: Callable[[], None],
    log_level: str,
    drain_seconds: int,
    tls: tuple[str | None, str | None],
    options: AppOptions,
) -> tuple[_Server, socket.socket, str]:
    if (tls[0] is None) != (tls[1] is None):
        raise ConfigError("TLS requires both ssl_keyfile and ssl_certfile")
    if options.get("allowed_hosts") is None and host in LOOPBACK:
        options = AppOptions(**{**options, "allowed_hosts": LOOPBACK})
    refuse_keywords("serve", options, AppOptions.__annotations__)
    app = create_app(engine, **options)
    listener = _bind(host, port)
    limits = app.state.server.state.limits
    slots = ConnectionSlots(most_connections(limits))
    config = uvicorn.Config(
        app,
        http=connection_class(limits, slots),
        # The default configuration closes every log handler of the process.
        log_config=None,
        log_level=log_level,
        access_log=log_level in ("info", "debug", "trace"),
        # Clients pool connections; the default of 5 s would close them before the next request.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=drain_seconds + ABORT_SECONDS,
        ws="none",
        server_header=False,
        ssl_keyfile=tls[0],
        ssl_certfile=tls[1],
    )
    server = _Server(config, app, on_ready, drain_seconds, slots)
    return server, listener, _url(host, listener, tls[0] is not None)
