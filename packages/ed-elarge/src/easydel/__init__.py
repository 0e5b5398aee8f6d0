"""The umbrella package: `import easydel as ed` exports the names of the seven packages lazily.

A package is imported at the first use of one of its names. `easydel._table` lists all names and
module paths. `tools.easydel_stub` writes them to `__init__.pyi`, which type checkers read.
"""

from __future__ import annotations

from importlib import metadata

from ed_elarge.import_paths import add_modules

from easydel import _table


def _refuse_the_other_easydel() -> None:
    """Raise an error if another distribution has overwritten files of this `easydel`."""
    try:
        version = metadata.version("easydel")
    except metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"the distributions 'easydel' {version} and 'ed-elarge' are both installed, and both have "
        "the import name 'easydel': remove one of them and reinstall the other "
        "(pip uninstall easydel ed-elarge; pip install ed-elarge)"
    )


_refuse_the_other_easydel()
add_modules(_table.SOURCES)
__getattr__, __dir__, __all__ = _table.attach(__name__)
