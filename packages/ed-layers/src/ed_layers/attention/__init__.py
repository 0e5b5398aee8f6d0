"""Attention is one function, `attend`, over a table of mechanisms.

- `dispatch` contains `attend`: it validates a call, and runs the mechanism that `mechanism`
  chooses;
- `mechanism` resolves the options of a configuration, and implements "auto";
- `kernel` defines the record of a kernel, the calls that kernels receive, and the tables of
  mechanisms and kernels, and runs a call; `scoring` defines the scores;
- `kernels` contains the implementations and their shared code;
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
        "attend_with_scoring": "ed_layers.attention.dispatch",
    },
)

if TYPE_CHECKING:
    from ed_layers.attention.dispatch import attend, attend_with_scoring
    from ed_layers.attention.kernel import MECHANISMS, Kernel
    from ed_layers.attention.mechanism import Mechanism
