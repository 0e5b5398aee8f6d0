"""Common parts of the client flows: the list of flows, and the command that runs them.

A flow is a documented use of a client. `python CLIENT_flows.py SCRIPTED_URL [TINY_URL]` runs the
flows whose servers are given, and prints a line of JSON for each. The command needs only the
client, so it also runs in an interpreter without this project's packages.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FLOWS: list[tuple[str, str, Callable[[str], None]]] = []
MODEL, KEY = "tiny", "none"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Bern", "Basel"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def flow(kind: str) -> Callable[[Callable[[str], None]], Callable[[str], None]]:
    """Add a flow against the server `scripted` or `tiny`."""

    def add(function: Callable[[str], None]) -> Callable[[str], None]:
        FLOWS.append((kind, function.__name__, function))
        return function

    return add


@contextmanager
def raises(kind: type[Exception], check: Callable[[Any], bool] = bool) -> Iterator[None]:
    """Expect an error of a class that passes a check."""
    try:
        yield
    except kind as error:
        if not check(error):
            raise
    else:
        raise AssertionError(f"{kind.__name__} was not raised")


def weather(city: str) -> str:
    """Return the weather in a city."""
    return f"12 degrees in {city}"


def main() -> int:
    """Run the flows whose servers are named on the command line."""
    urls = dict(zip(("scripted", "tiny"), sys.argv[1:], strict=False))
    failed = 0
    for kind, name, function in FLOWS:
        if kind not in urls:
            continue
        start, error = time.monotonic(), None
        try:
            function(urls[kind])
        except Exception:
            error = traceback.format_exc(limit=-4)
            failed += 1
        seconds = round(time.monotonic() - start, 2)
        line = {"server": kind, "flow": name, "seconds": seconds, "error": error}
        print(json.dumps(line), flush=True)
    return 1 if failed else 0
