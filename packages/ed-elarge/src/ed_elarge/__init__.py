"""One YAML from data to a served model: the elarge runner and the `easydel` umbrella."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ed_infra.lazy import attach

if TYPE_CHECKING:
    from ed_elarge.errors import InputError as InputError
    from ed_elarge.model import eLargeModel as eLargeModel

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "InputError": "ed_elarge.errors",
        "eLargeModel": "ed_elarge.model",
    },
)
