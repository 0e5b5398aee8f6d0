"""`EasyDeLBaseConfig` and its execution fields. Importing this package does not import jax."""

# ruff: noqa: F401 - names for type checkers
from typing import TYPE_CHECKING

from ed_infra.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, {"EasyDeLBaseConfig": "ed_infra.config.base"})

if TYPE_CHECKING:
    from ed_infra.config.base import EasyDeLBaseConfig
