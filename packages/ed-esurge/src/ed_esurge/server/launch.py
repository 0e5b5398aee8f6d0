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
from typing import Any

import uvicorn
from ed_infra import freed_memory
from ed_infra.errors import ConfigError, EasyDeLError
from ed_infra.host_memory import settle
from ed_infra.logging import show_times
from starlette.applications import Starlette
from uvicorn.logging import AccessFormatter, DefaultFormatter

from ed_esurge.engine.transport import follow_all
from ed_esurge.server.app import Engines, create_app
from ed_esurge.server.http.admission import LOOPBACK
from ed_esurge.server.http.connections import (
    SEND_BUFFER,
    ConnectionSlots,
    connection_class,
    most_connections,
)
from ed_esurge.server.http.handshakes import TlsListener
from ed_esurge.server.operations.throughput import ProbeFilter, log_throughput
from ed_esurge.server.options import ListenOptions

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
        self._throughput: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.is_ssl:
            await super().startup([])
            for listener in sockets or ():
                self.servers.append(self._listen_with_tls(listener))
        else:
            await super().startup(sockets)
        if self.started:
            metrics = self._app.state.server.metrics
            self._throughput = asyncio.create_task(log_throughput(metrics))
            self._on_ready()

    def list_names(self) -> list[str]:
        """Return the names of the models in requests."""
        return [name for model in self._app.state.server.models for name in model.names]

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
            if self._throughput is not None:
                self._throughput.cancel()

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


class eSurgeApiServer:
    """A server as an object, as in EasyDeL; `run` is `serve`.

    Args:
        engines: an `eSurge`, or a mapping of model names to engines, see `create_app`.
        options: fields of `ListenOptions`, such as `api_key` or `max_concurrent_requests`.

    Raises:
        ConfigError: an option is invalid.
    """

    def __init__(self, engines: Engines, **options: object) -> None:
        ListenOptions.merge("eSurgeApiServer", None, options)
        self.engines, self.options = engines, options

    def run(self, host: str | None = None, port: int | None = None, **options: object) -> None:
        """Serve until a signal; the arguments are those of `serve`."""
        keywords: dict[str, Any] = {**self.options, **options}
        serve(self.engines, host, port, None, **keywords)


def serve(
    engine: Engines,
    host: str | None = None,
    port: int | None = None,
    options: ListenOptions | None = None,
    *,
    on_ready: Callable[[str, Sequence[str]], object] | None = None,
    **keywords: object,
) -> None:
    """Serve an engine until SIGTERM or Ctrl-C. Return after the running requests are finished.

    Prints one line with the URL when the server accepts requests. If the model uses devices of
    several processes, every process calls this function: the first process serves, and the others
    return after it.

    Args:
        engine: an `eSurge`, or several, see `create_app`.
        host, port: fields of `ListenOptions`.
        options: see `ListenOptions`. Without them, the default of `log_level` is `"warning"`.
        on_ready: gets the URL and the names of the models instead of the printed line.
        keywords: fields of `ListenOptions`; they have precedence over `options`.

    Raises:
        ConfigError: the address is not available, or one of the two TLS files is missing.
        EasyDeLError: the server could not start.
    """
    if options is None:
        keywords = {"log_level": "warning", **keywords}
    keywords |= {"host": host, "port": port}
    options = ListenOptions.merge("serve", options, keywords)
    freed_memory.limit_arenas()
    with leading(engine) as leads:
        if leads:

            def announce() -> None:
                settle()
                if on_ready is None:
                    print(ready_line(url), flush=True)
                else:
                    on_ready(url, server.list_names())
                cleaner = threading.Timer(SETTLING_SECONDS, settle)
                cleaner.daemon = True
                cleaner.start()

            server, listener, url = _prepare(engine, options, announce)
            has_keys = bool(options.api_key or options.api_key_file)
            if options.host not in LOOPBACK and not has_keys:
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


def load_adapters(engine: Any, adapters: Mapping[str, str]) -> None:
    """Load the adapters of `lora_modules` before the engine serves.

    Args:
        engine: an `eSurge`, or an engine of replicas.
        adapters: name -> directory in PEFT's layout.

    Raises:
        EasyDeLError: see `eSurge.load_lora_adapter`.
    """
    for name, directory in adapters.items():
        loading = engine.load_lora_adapter(name, directory)
        if loading is not None:  # of replicas
            asyncio.run(loading)


def ready_line(url: str) -> str:
    """Return the line that states that a server accepts requests."""
    return f"serving at {url} (Ctrl-C stops)"


@contextmanager
def background(
    engine: Engines,
    host: str | None = None,
    port: int = 0,
    options: ListenOptions | None = None,
    **keywords: object,
) -> Iterator[str]:
    """Serve from a thread during the block. Yields the URL (for notebooks and tests).

    Args:
        engine: see `create_app`.
        host, port: fields of `ListenOptions`; the default is a free port.
        options: see `ListenOptions`.
        keywords: fields of `ListenOptions`; they have precedence over `options`. Without `options`,
            the defaults are `drain_seconds=5` and `log_level="warning"`.
    """
    if options is None:
        keywords = {"drain_seconds": 5, "log_level": "warning", **keywords}
    keywords |= {"host": host, "port": port}
    options = ListenOptions.merge("background", options, keywords)
    ready = threading.Event()
    server, listener, url = _prepare(engine, options, ready.set)

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
        deadline = time.monotonic() + options.drain_seconds + ABORT_SECONDS + 5
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(0.1)
        listener.close()


@contextmanager
def _logs() -> Iterator[None]:
    """Write uvicorn's messages to standard error, and its requests to standard output, with times.

    Successful requests of probes are not written.
    """
    request = '%(asctime)s %(levelprefix)s %(client_addr)s - "%(request_line)s" %(status_code)s'
    log_targets = {
        "uvicorn": (sys.stderr, DefaultFormatter("%(asctime)s %(levelprefix)s %(message)s")),
        "uvicorn.access": (sys.stdout, AccessFormatter(request)),
    }
    added: list[tuple[logging.Logger, logging.Handler]] = []
    for name, (stream, formatter) in log_targets.items():
        handler = logging.StreamHandler(stream)
        handler.setFormatter(formatter)
        handler.addFilter(ProbeFilter())
        added.append((logging.getLogger(name), handler))
        added[-1][0].addHandler(handler)
        added[-1][0].propagate = False
    try:
        with show_times():
            yield
    finally:
        for log, handler in added:
            log.removeHandler(handler)


def _prepare(
    engine: Engines, options: ListenOptions, on_ready: Callable[[], None]
) -> tuple[_Server, socket.socket, str]:
    if options.allowed_hosts is None and options.host in LOOPBACK:
        options = options.replace(allowed_hosts=LOOPBACK)
    app = create_app(engine, options)
    log_level, tls = options.log_level, options.ssl_keyfile is not None
    listener = _bind(options.host, options.port)
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
        timeout_graceful_shutdown=options.drain_seconds + ABORT_SECONDS,
        ws="none",
        server_header=False,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
    )
    server = _Server(config, app, on_ready, options.drain_seconds, slots)
    return server, listener, _url(options.host, listener, tls)
