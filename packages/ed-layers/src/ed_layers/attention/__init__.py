"""Attention is one function, `attend`, over a table of mechanisms.

- `dispatch` contains `attend`: it validates a call, and runs the mechanism that `mechanism`
  chooses;
- `mechanism` resolves the options of a configuration, and implements "auto";
- `kernel` contains the table of mechanisms, the record of a kernel, and the calls that kernels
  receive; `scoring` defines the scores;
- `kernels` contains the implementations, and runs a call with the first kernel that accepts it;
- `blocks` contains the attention blocks of models.
"""

# ruff: noqa: F401 - names for type checkers
from typing import TYPE_CHECKING

from ed_infra.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "MECHANISMS": "ed_layers.attention.kernel",
        "Kernel": "ed_layers.attention.kernel",
        "Mechanism": "ed_layers.attention.mechanism",
        "attend": "ed_layers.attention.dispatch",
        "attend_and_write": "ed_layers.attention.dispatch",
        "attend_with_scoring": "ed_layers.attention.dispatch",
    },
)

if TYPE_CHECKING:
    from ed_layers.attention.dispatch import attend, attend_and_write, attend_with_scoring
    from ed_layers.attention.kernel import MECHANISMS, Kernel
    from ed_layers.attention.mechanism import Mechanism
