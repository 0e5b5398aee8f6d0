"""The option `media`: hosts, stores and folders whose files rows may name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Annotated, NamedTuple
from urllib.parse import unquote, urlsplit

from pydantic import BeforeValidator, Field

from ed_data.config.base import DataOptions
from ed_data.config.source import path_text
from ed_data.errors import KeyPath

#: Protocols of object stores that rows may name, and other spellings of them.
STORES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "hf": "hf"}
STORES |= {"abfs": "abfs", "abfss": "abfs"}
WEB = ("http", "https")
_HOST = re.compile(r"(?=.{1,253}\Z)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*|[0-9a-f:.]{2,45}")
_FOLDERS = ("/", "./", "../", "~", ".\\", "..\\")
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


class Host(NamedTuple):
    """A host from which files may be downloaded.

    Attributes:
        name: the name or the IP address.
        scheme: `http` or `https`; None allows both.
        port: the port; None allows every port.
    """

    name: str
    scheme: str | None = None
    port: int | None = None

    def matches(self, scheme: str, name: str, port: int | None) -> bool:
        """Return whether an address has this host."""
        effective_port = port or {"http": 80, "https": 443}[scheme]
        return (
            self.name == name
            and self.scheme in (None, scheme)
            and self.port in (None, effective_port)
        )


class Media(DataOptions):
    """The files of images and recordings that rows may name.

    A row may always name a file in the folder of its data set, by a path, and may contain the file
    itself, as bytes or as a `data:` address. Rows are data of strangers, so each other place must
    be in `allowed`.
    """

    allowed: tuple[Annotated[str, BeforeValidator(path_text)], ...] = Field(
        default=(), max_length=4096
    )
    """Hosts (`images.example.com`, `https://10.0.0.5`), folders of stores (`s3://bucket/images`)
    and folders of this machine (`/data/images`, `./images`) whose files rows may name. A host with
    a private IP address also requires the IP address in this list."""

    def _problems(self) -> Iterator[tuple[KeyPath, str]]:
        for number, entry in enumerate(self.allowed):
            if problem := _find_problem(entry):
                yield ("allowed", number), problem

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts of the list."""
        return tuple(host for entry in self.allowed if (host := parse_host(entry)) is not None)

    @property
    def folders(self) -> tuple[str, ...]:
        """The absolute paths of the folders, and the addresses of the folders of stores."""
        return tuple(
            entry if parse_scheme(entry) in STORES else os.path.abspath(os.path.expanduser(entry))
            for entry in self.allowed
            if parse_scheme(entry) in STORES or _is_folder(entry)
        )


def parse_scheme(address: str) -> str | None:
    """Return the scheme of an address in lower case; None for a path or a name."""
    match = _SCHEME.match(address)
    return None if match is None else match[1].lower()


def parse_host(entry: str) -> Host | None:
    """Return the host of an entry of the list; None if the entry is a folder or invalid."""
    scheme = parse_scheme(entry)
    if scheme not in (None, *WEB) or _is_folder(entry):
        return None
    try:
        parts = urlsplit(
            entry if scheme else f"//[{entry}]" if entry.count(":") > 1 else f"//{entry}"
        )
        name, port = parts.hostname or "", parts.port
    except ValueError:
        return None
    extra_parts = parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
    if extra_parts or not _HOST.fullmatch(name):
        return None
    return Host(name, scheme, port)


def split_store(address: str) -> tuple[str, ...] | None:
    """Return the protocol and the folders of an address of a store.

    The result is None if the address can leave its folder on some store: it has a part such as
    `..`, also as `%2e%2e`, or chains protocols with `::`.
    """
    scheme = parse_scheme(address)
    if scheme is None or "::" in address or "\0" in address:
        return None
    parts = address.partition("://")[2].strip("/").split("/")
    for part in parts:
        decoded_part = unquote(unquote(unquote(part)))
        if decoded_part in ("", ".", "..") or "/" in decoded_part or "\\" in decoded_part:
            return None
    if scheme == "hf" and len(parts) > 2:  # a version of a repository is in the repository
        parts[2] = parts[2].partition("@")[0]
    return (STORES.get(scheme, scheme), *parts)


def _is_folder(entry: str) -> bool:
    is_path = entry.startswith(_FOLDERS) or entry == "." or _DRIVE.match(entry) is not None
    return is_path and not entry.startswith(("//", "\\\\"))


def _find_problem(entry: str) -> str | None:
    scheme = parse_scheme(entry)
    if scheme in STORES:
        if split_store(entry) is None:
            return f"{entry!r} is no folder of a store: write it as 's3://bucket/folder'"
    elif not _is_folder(entry) and parse_host(entry) is None:
        return (
            f"{entry!r} is neither a host (images.example.com, https://images.example.com), a "
            f"folder of a store ({', '.join(STORES)}: 's3://bucket/folder'), nor a folder of this "
            "machine ('/data/images', './images'): correct the entry"
        )
    return None
