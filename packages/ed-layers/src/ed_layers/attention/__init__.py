"""Attention is one function, `attend`, over a table of mechanisms.

- `attend` validates a call, and runs the mechanism that `mechanism` chooses;
- `mechanism` resolves the options of a configuration, and implements "auto";
- `registry` contains the tables of mechanisms and kernels, and runs a call;
- `kernel` defines the record of a kernel, and the calls that kernels receive; `scoring` the scores;
- `kernels` contains the implementations and their shared code;
- `blocks` contains the attention blocks of models.
"""

from ed_layers.attention.attend import attend as attend
from ed_layers.attention.kernel import Kernel as Kernel
from ed_layers.attention.mechanism import Mechanism as Mechanism
from ed_layers.attention.registry import MECHANISMS as MECHANISMS
