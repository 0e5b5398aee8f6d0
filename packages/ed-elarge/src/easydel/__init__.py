"""The umbrella: `import easydel as ed` gives, lazily, what the seven packages own.

Importing it costs nothing: a name's package is loaded when the name is used. All names and module
paths are in one table, `easydel._table`.
"""

from __future__ import annotations

from importlib import metadata

from easydel._table import attach


def _refuse_the_other_easydel() -> None:
    """Two distributions that install `easydel` overwrite each other's files: say so, and stop."""
    try:
        version = metadata.version("easydel")
    except metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"the distribution 'easydel' {version} is installed beside 'ed-elarge', and both own the "
        "import name 'easydel': remove one of them and reinstall the other "
        "(pip uninstall easydel ed-elarge; pip install ed-elarge)"
    )


_refuse_the_other_easydel()
__getattr__, __dir__, __all__ = attach(__name__)
