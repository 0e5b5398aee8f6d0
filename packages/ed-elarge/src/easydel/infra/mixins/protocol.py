"""A module path of EasyDeL's guides. The names are in `easydel._table`."""

from easydel._table import attach

__getattr__, __dir__, __all__ = attach(__name__)
