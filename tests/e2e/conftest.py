"""A browser for the tests of the playground."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tools.chromium import Tab, browser


@pytest.fixture(scope="module")
def open_tab() -> Iterator[Callable[..., Tab]]:
    with browser() as opener:
        yield opener
