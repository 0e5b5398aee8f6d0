"""Reads the files of images and recordings: from this machine, from a listed host or from a store.

Rows name these files, so each file has a limit of bytes, and each download a limit of time. Only
regular files are read. A host is resolved once, its addresses must be public or in the list, and
redirects are not followed. `ed_esurge.server.generation.images` downloads the images of requests
by the same rules.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import os
import socket
import ssl
import stat
import threading
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, NamedTuple

from ed_data.config.media import WEB, Host, parse_scheme
from ed_data.public_addresses import is_public

if TYPE_CHECKING:
    import httpx

#: Seconds of a download.
DOWNLOAD_SECONDS = 120.0


class RemoteFile(NamedTuple):
    """A file that a row names by an address.

    Attributes:
        address: an address of a store, or of one of the hosts.
        hosts: the hosts from which files may be downloaded.
    """

    address: str
    hosts: tuple[Host, ...] = ()


def open_local(path: str, limit: int) -> IO[bytes]:
    """Open a regular file of at most `limit` bytes.

    Args:
        path: the path without symbolic links, see `os.path.realpath`.
        limit: largest number of bytes.

    Raises:
        OSError: the file does not exist, is a link or no regular file, or is too large.
    """
    if os.path.realpath(path) != path:
        raise OSError(f"{path!r} has a symbolic link, which was no part of the path before")
    with contextlib.ExitStack() as opened:
        file = opened.enter_context(open(path, "rb", opener=_open_regular))
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise FileTooLargeError(size, limit)
        opened.pop_all()
        return file


def _open_regular(path: str, flags: int) -> int:
    # Without O_NONBLOCK, a pipe without a writer blocks forever.
    flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(path, flags)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(f"{path!r} is not a regular file")


def open_file(source: str | bytes | RemoteFile, limit: int) -> IO[bytes]:
    """Open a file, a remote file or encoded bytes.

    Raises:
        OSError: the file cannot be read, has more than `limit` bytes, or is at a place that rows
            may not name.
    """
    if isinstance(source, str):
        return open_local(source, limit)
    raw = _read_remote(source, limit) if isinstance(source, RemoteFile) else source
    if len(raw) > limit:
        raise FileTooLargeError(len(raw), limit)
    return io.BytesIO(raw)


def read_media(source: str | bytes | RemoteFile, limit: int) -> bytes:
    """Return the content of a file; see `open_file`."""
    with open_file(source, limit) as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise FileTooLargeError(len(raw), limit)
    return raw


class FileTooLargeError(OSError):
    """A file has more bytes than its limit."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"has {size} bytes, and the limit is {limit}")


def _read_remote(file: RemoteFile, limit: int) -> bytes:
    """Return the content of a remote file; of a larger file, one byte more than the limit."""
    if parse_scheme(file.address) in WEB:
        return _run_download(file, limit)
    import fsspec  # a tenth of a second, which checks of run files do not need

    if "::" in file.address:
        raise OSError("an address may not chain protocols with '::'")
    try:
        fs, path = fsspec.core.url_to_fs(file.address)
        with fs.open(path, "rb") as opened:
            return opened.read(limit + 1)
    except OSError:
        raise
    except Exception as error:  # stores raise the errors of their clients
        raise OSError(f"{file.address!r} cannot be read: {error}") from error


def _run_download(file: RemoteFile, limit: int) -> bytes:
    """Download in a thread of its own, because the caller may have a running event loop."""
    result: list[bytes] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(asyncio.run(_download(file, limit)))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ed-data-download", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return result[0]


async def _download(file: RemoteFile, limit: int) -> bytes:
    import httpx

    try:
        address = httpx.URL(file.address)
    except (httpx.InvalidURL, TypeError) as error:
        raise OSError(f"{file.address!r:.200} is no address: {error}") from error
    name, scheme = address.raw_host.decode("ascii").lower(), address.scheme
    if not is_listed(address, file.hosts):
        raise OSError(f"the host {name!r:.100} is not in mixture.media.allowed")
    data = bytearray()
    try:
        async with (
            asyncio.timeout(DOWNLOAD_SECONDS),
            httpx.AsyncClient(
                follow_redirects=False, trust_env=False, verify=_tls(), timeout=DOWNLOAD_SECONDS
            ) as client,
        ):
            number = await _resolve(name, address.port or {"http": 80, "https": 443}[scheme], file)
            # The checked number is requested, so a later answer of the name server changes nothing.
            async with client.stream(
                "GET",
                address.copy_with(host=number, username="", password=""),
                headers={"Host": address.netloc.decode("ascii"), "Accept-Encoding": "identity"},
                extensions={"sni_hostname": name},
            ) as answer:
                if answer.status_code != 200:
                    raise OSError(f"the download failed with status {answer.status_code}")
                async for chunk in answer.aiter_raw():
                    data += chunk
                    if len(data) > limit:
                        break
    except TimeoutError as error:
        message = f"the download of {file.address!r:.200} took more than {DOWNLOAD_SECONDS:g} s"
        raise OSError(message) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        message = f"the download of {file.address!r:.200} failed: {type(error).__name__}: {error}"
        raise OSError(message) from error
    return bytes(data)


def is_listed(address: httpx.URL, hosts: Sequence[Host]) -> bool:
    """Return whether the host of an address is one of the hosts."""
    name, scheme = address.raw_host.decode("ascii").lower(), address.scheme
    return scheme in WEB and any(host.matches(scheme, name, address.port) for host in hosts)


async def _resolve(name: str, port: int, file: RemoteFile) -> str:
    """Return the IP address of a host. All its addresses must be public or in the list."""
    loop = asyncio.get_running_loop()
    entries = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    numbers = [str(entry[4][0]) for entry in entries]
    names = {host.name for host in file.hosts}
    for number in numbers:
        if not (is_public(number) or number in names):
            raise OSError(
                f"the host {name!r:.100} has the address {number}, which is not public: add it to "
                "mixture.media.allowed, too, if rows may read from it"
            )
    return numbers[0]


@functools.cache
def _tls() -> ssl.SSLContext:
    import httpx

    return httpx.create_ssl_context(trust_env=False)
