"""Attention is one function, `attend`, over a table of mechanisms."""

from ed_layers.attention.attend import attend as attend
from ed_layers.attention.mechanism import MECHANISMS as MECHANISMS
from ed_layers.attention.mechanism import Mechanism as Mechanism
