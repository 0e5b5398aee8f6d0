"""The files of images and recordings that rows name: which files a row may read.

A row is data of a stranger. It may contain a medium as bytes or as a `data:` address, name a file
in the folder of its data set, or name a file at a place in `mixture.media.allowed`. All other paths
and addresses are errors, and nothing is read or requested.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Sequence

from ed_data.config.media import STORES, WEB, Media, parse_scheme, split_store
from ed_data.errors import DataError
from ed_data.media_access import RemoteFile, is_listed

#: Longest path of a file on common systems.
_LONGEST = 4096
#: Paths that Windows reads from another machine, or as a device.
_UNC = re.compile(r"[\\/]{2}")


class MediaFolder:
    """The folder of a data set, and the other places whose files its rows may name.

    Args:
        folders: folders of the data set, as paths or addresses; the first contains the row's file.
        media: the other places.
    """

    def __init__(self, folders: Sequence[str] = (), media: Media | None = None) -> None:
        media = Media() if media is None else media
        self.hosts = media.hosts
        self._named = tuple(folders)
        every = (*folders, *media.folders)
        self._paths = [os.path.abspath(folder) for folder in every if parse_scheme(folder) is None]
        self._roots = [*self._paths, *(os.path.realpath(path) for path in self._paths)]
        addresses = [folder for folder in every if parse_scheme(folder) not in (None, *WEB)]
        self._stores = [
            parts for address in addresses if (parts := split_store(address)) is not None
        ]

    def locate(self, text: str, location: str, *, kind: str, key: str) -> str | bytes | RemoteFile:
        """Return the file that a row names: a path without links, content, or a remote file.

        Args:
            text: the path or address. A path is relative to the folder of the row's file, to an
                allowed folder, or to the working folder.
            location: the row, for messages.
            kind: what the file contains, for messages.
            key: the option of the inform that names the field.

        Raises:
            DataError: there is no such file, or rows may not name it.
        """
        if text[:5].lower() == "data:":
            return decode_data_url(text, location, f"the {kind}")
        scheme = parse_scheme(text)
        if scheme == "file":
            host, slash, file_path = text.partition("://")[2].partition("/")
            if host.lower() in ("", "localhost"):
                return self._find(f"{slash}{file_path}", text, location, kind, key)
        elif scheme is None and "://" not in text:
            return self._find(text, text, location, kind, key)
        elif scheme in WEB:
            if self.hosts:  # the host is compared when the file is read
                return self._check_host(RemoteFile(text, self.hosts), location, kind, key)
        elif (parts := split_store(text)) is not None and self._holds(parts):
            return RemoteFile(text)
        raise self._refuse(text, location, kind, key)

    def _check_host(self, file: RemoteFile, location: str, kind: str, key: str) -> RemoteFile:
        import httpx  # not needed to check a run file

        try:
            allowed = is_listed(httpx.URL(file.address), self.hosts)
        except httpx.InvalidURL:
            allowed = False
        if not allowed:
            raise self._refuse(file.address, location, kind, key)
        return file

    def _holds(self, parts: Sequence[str]) -> bool:
        return any(tuple(parts[: len(store)]) == store for store in self._stores)

    def _find(self, path: str, text: str, location: str, kind: str, key: str) -> str | RemoteFile:
        if "\0" in path or len(path) > _LONGEST or _UNC.match(path):
            raise self._refuse(text, location, kind, key)
        base = self._named[0] if self._named else ""
        if parse_scheme(base) in WEB:
            return self._check_host(RemoteFile(f"{base}/{path}", self.hosts), location, kind, key)
        if parse_scheme(base) is not None and not os.path.isabs(path):
            address = f"{base}/{path}"
            parts = split_store(address)
            if parts is not None and self._holds(parts):
                return RemoteFile(address)
        candidates = [os.path.normpath(os.path.join(folder, path)) for folder in self._paths]
        candidates.append(os.path.abspath(path))
        inside = [full for full in candidates if _is_inside(full, self._roots)]
        for candidate in inside:
            try:
                real = os.path.realpath(candidate)
                if _is_inside(real, self._roots) and os.path.isfile(real):
                    return real
                outside = os.path.lexists(candidate) and not _is_inside(real, self._roots)
            except (OSError, ValueError) as error:
                raise DataError(
                    f"{location}: the path {text!r:.200} of the {kind} is invalid: {error}; "
                    "correct "
                    "the path, or set on_error: skip",
                    (key,),
                ) from error
            if outside:
                raise self._refuse(text, location, kind, key)
        if not inside:
            raise self._refuse(text, location, kind, key)
        raise DataError(
            f"{location}: there is no {kind} {text!r:.200} in {base or os.getcwd()!r}; correct the "
            "path, or set on_error: skip",
            (key,),
        )

    def _refuse(self, text: str, location: str, kind: str, key: str) -> DataError:
        scheme = parse_scheme(text)
        place = "its folder"
        if scheme in WEB:
            place = "its host"
        elif scheme is not None and scheme != "file" and scheme not in STORES:
            place = "the folder of a store or a host"
        folder = self._named[0] if self._named else "no folder"
        return DataError(
            f"{location}: a row may not name the {kind} {text!r:.200}, because it is outside of "
            "the "
            f"folder of the data set ({folder}): move the file there, add {place} to "
            "mixture.media.allowed, or set on_error: skip",
            (key,),
        )


def decode_data_url(text: str, location: str, noun: str) -> bytes:
    """Return the content of a `data:` address.

    Raises:
        DataError: the content is not base64 text.
    """
    return decode_base64(text.partition(",")[2], location, noun, "data URL")


def decode_base64(text: str, location: str, noun: str, form: str) -> bytes:
    """Return the content of base64 text; `form` names the text in messages.

    Raises:
        DataError: the text is not base64.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(
            f"{location}: {noun} has an invalid {form}: {error}; correct the row, or set "
            "on_error: skip"
        ) from error


def _is_inside(path: str, roots: Sequence[str]) -> bool:
    normal_path = os.path.normcase(path)
    for root in map(os.path.normcase, roots):
        if normal_path == root or normal_path.startswith(root.rstrip(os.sep) + os.sep):
            return True
    return False
