"""Attention is one function, `attend`, over a table of mechanisms.

Where things are: `registry` has the two tables, of mechanisms and of kernels; `kernel` says what a
kernel is; `choose` says what "auto" takes; `mechanism` reads a configuration. Every other file is
one kernel (`vanilla`, `blockwise`, `splash`, ...) or something that several kernels share:
`scoring`, `softmax`, `extent`, `online`, `slots`, `ring_layout`, `devices`.
"""

from ed_layers.attention.attend import attend as attend
from ed_layers.attention.kernel import Kernel as Kernel
from ed_layers.attention.mechanism import Mechanism as Mechanism
from ed_layers.attention.registry import MECHANISMS as MECHANISMS
