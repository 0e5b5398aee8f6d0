"""A faster import of the models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers


def share_table_of_names() -> None:
    """Let `transformers.models` use the table of names that `transformers` has made.

    Both read about 2,000 files for this table, which takes a quarter of a second. The function
    does nothing if a release of transformers has other internals.
    """
    utils: Any = getattr(transformers.utils, "import_utils", None)
    table_of = getattr(utils, "define_import_structure", None)
    if table_of is None or not hasattr(table_of, "cache_info"):  # it keeps its results
        return
    folder, start = Path(str(transformers.__file__)).parent / "models", "models."

    def known(path: str, prefix: str | None = None) -> Any:
        if prefix is not None or Path(path) != folder / "__init__.py":
            return table_of(path, prefix)
        return {
            backends: {
                module.removeprefix(start): set(names)
                for module, names in modules.items()
                if module.startswith(start)
            }
            for backends, modules in table_of(folder, prefix="models").items()
        }

    utils.define_import_structure = known
