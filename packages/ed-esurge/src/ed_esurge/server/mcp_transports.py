"""Connections to MCP servers that read messages of a bounded size.

The transports of the official client read a line or an answer of any length into memory.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ed_esurge.server.http.body import aside

if TYPE_CHECKING:
    import httpx2

#: Limit of one message of a server, in bytes.
MAX_MESSAGE_BYTES = 2**23
# Seconds until a process that does not end after its input ended is killed.
_END_SECONDS = 2.0


@asynccontextmanager
async def stdio_transport(
    command: str, args: Sequence[str], env: Mapping[str, str] | None
) -> AsyncGenerator[Any]:
    """Run a program, and yield the streams of its messages.

    A message beyond `MAX_MESSAGE_BYTES` ends the connection.
    """
    import anyio
    import mcp_types as types
    from mcp.client.stdio import get_default_environment
    from mcp.shared.message import SessionMessage

    process = await asyncio.create_subprocess_exec(
        command,
        *args,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**get_default_environment(), **(env or {})},
        limit=MAX_MESSAGE_BYTES,
        start_new_session=True,
    )
    assert process.stdin is not None, "a pipe"
    assert process.stdout is not None, "a pipe"
    message_sender, read_stream = anyio.create_memory_object_stream[Any](0)
    write_stream, message_receiver = anyio.create_memory_object_stream[Any](0)
    stdin, stdout = process.stdin, process.stdout

    async def read() -> None:
        async with message_sender:
            while True:
                try:
                    line = await stdout.readline()
                except ValueError:  # the message is too long
                    return
                if not line:
                    return
                parse = partial(types.jsonrpc_message_adapter.validate_json, line, by_name=False)
                try:
                    message: SessionMessage | ValueError = SessionMessage(
                        await aside(parse, len(line))
                    )
                except ValueError as error:
                    message = error
                await message_sender.send(message)

    async def write() -> None:
        async with message_receiver:
            async for item in message_receiver:
                text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                stdin.write(f"{text}\n".encode())
                await stdin.drain()

    async def serve(work: Callable[[], Awaitable[None]]) -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            await work()
        message_sender.close()  # the session reports the end of the connection to running calls

    tasks = [asyncio.create_task(serve(work)) for work in (read, write)]
    try:
        yield read_stream, write_stream
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (message_sender, read_stream, write_stream, message_receiver):
            stream.close()
        await asyncio.shield(_end(process))


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a process and its children."""
    assert process.stdin is not None, "the process has a pipe"
    with suppress(OSError):
        process.stdin.close()
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _END_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    assert process.stdout is not None, "the process has a pipe"
    while await process.stdout.read(2**16):  # the end of the pipe releases its resources
        pass
    await process.wait()


def bounded_http_client(headers: Mapping[str, str] | None) -> Any:
    """Return an HTTP client that reads answers up to `MAX_MESSAGE_BYTES`.

    In a stream of events, the limit applies to each line.
    """
    import httpx2
    from mcp.shared._httpx_utils import create_mcp_http_client

    class BoundedStream(httpx2.AsyncByteStream):
        def __init__(self, stream: Any, by_line: bool) -> None:
            self._stream, self._by_line = stream, by_line

        async def __aiter__(self) -> AsyncIterator[bytes]:
            count = 0
            async for chunk in self._stream:
                count += len(chunk)
                if self._by_line and (place := chunk.rfind(b"\n")) >= 0:
                    count = len(chunk) - place - 1
                if count > MAX_MESSAGE_BYTES:
                    raise httpx2.ReadError(f"a message exceeds {MAX_MESSAGE_BYTES} bytes")
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def bound(response: httpx2.Response) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise httpx2.ReadError("the answer is compressed")  # its length is unknown
        kind = response.headers.get("content-type", "")
        by_line = kind.startswith("text/event-stream")
        response.stream = BoundedStream(response.stream, by_line)

    client = create_mcp_http_client(headers={**(headers or {}), "accept-encoding": "identity"})
    client.event_hooks = {"request": [], "response": [bound]}
    return client
