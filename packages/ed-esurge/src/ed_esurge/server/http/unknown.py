"""Keys of a request that this server does not know: ignored, reported or refused."""

from __future__ import annotations

import logging
from typing import get_args

from ed_infra.errors import ConfigError

from ed_esurge.config import UnknownFields

logger = logging.getLogger(__name__)

#: The header of an answer that names the ignored keys of its request.
HEADER = "X-Ignored-Fields"
# Bounds of that header, and of the keys that are remembered for the log.
MAX_NAMED, MAX_CHARACTERS, MAX_LOGGED = 8, 64, 1024


class IgnoredKeys:
    """The unknown keys of one request.

    Args:
        policy: "refuse" makes an unknown key an error.
    """

    def __init__(self, policy: UnknownFields) -> None:
        self.policy = policy
        self._names: dict[str, None] = {}
        self._more = 0

    @property
    def refuses(self) -> bool:
        """Whether an unknown key is an error."""
        return self.policy == "refuse"

    def add(self, key: object) -> None:
        """Note an ignored key."""
        if len(self._names) < MAX_NAMED:
            self._names[_printable(str(key)[: MAX_CHARACTERS + 1])] = None
        elif key not in self._names:
            self._more += 1

    @property
    def names(self) -> list[str]:
        """The first ignored keys, cut to `MAX_CHARACTERS`."""
        return [*self._names]

    @property
    def header(self) -> str | None:
        """The value of `X-Ignored-Fields`; None: the answer needs no such header."""
        if self.policy != "warn" or not self._names:
            return None
        more = f" (and {self._more} more)" if self._more else ""
        return ", ".join(self._names) + more


def _printable(text: str) -> str:
    """ASCII without control characters: the text goes into a header and into the log."""
    shown = text[:MAX_CHARACTERS].encode("ascii", "backslashreplace").decode()
    plain = "".join(char if " " <= char <= "~" else "?" for char in shown)[:MAX_CHARACTERS]
    return plain + "..." if len(text) > MAX_CHARACTERS else plain


class UnknownFieldsPolicy:
    """The policy of a server. Each ignored key is logged once.

    Raises:
        ConfigError: the policy has another name.
    """

    def __init__(self, policy: str = "warn") -> None:
        if policy not in get_args(UnknownFields):
            known = ", ".join(get_args(UnknownFields))
            raise ConfigError(f"unknown_fields={policy!r} is not known: choose one of {known}")
        self.policy: UnknownFields = policy  # type: ignore[assignment]
        self._logged: set[str] = set()

    def request(self) -> IgnoredKeys:
        """Return the collector of a new request."""
        return IgnoredKeys(self.policy)

    def log(self, ignored: IgnoredKeys, path: str) -> None:
        """Log the keys of a request that were not logged before."""
        if ignored.header is None:
            return
        for name in ignored.names:
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                logger.warning("%s: the unknown request field %s is ignored", path, name)
