"""The model of the snippets, whose tokenizer the documented blocks use."""

from __future__ import annotations

from tests.snippets.conftest import quickstart_model

__all__ = ["quickstart_model"]
