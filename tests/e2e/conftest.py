"""A browser for the tests of the playground."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page

from tests.playground import browser


@pytest.fixture(scope="module")
def open_tab() -> Iterator[Callable[..., Page]]:
    with browser() as opener:
        yield opener
