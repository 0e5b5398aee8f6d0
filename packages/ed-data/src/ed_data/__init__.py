"""Deterministic, resumable data for language models: sources, tokenization, packing, mixtures.

Names are imported when they are first used: `import ed_data` itself imports nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ed_data.batches.loader import Loader, StreamLoader
    from ed_data.batches.prompts import PromptLoader, build_prompts
    from ed_data.build import build_loader
    from ed_data.checks import check_names, idle_options, without_tokens
    from ed_data.config import Inform, Media, Mixture, Saving, Tokenization
    from ed_data.errors import DataError
    from ed_data.order.packing import Packing, pack
    from ed_data.report import Report, data_report
    from ed_data.rows.documents import documents
    from ed_data.rows.example import Example
    from ed_data.rows.splits import contents, default_cache_dir, texts
    from ed_data.save import remove_cache, save_mixture
    from ed_data.schema import Column, Schema, Value
    from ed_data.sources import read_rows
    from ed_data.tokens.bpe import train_bpe

_OWNERS = {
    "build": "build_loader",
    "checks": "check_names idle_options without_tokens",
    "config": "Inform Media Mixture Saving Tokenization",
    "errors": "DataError",
    "batches.loader": "Loader StreamLoader",
    "order.packing": "Packing pack",
    "rows.splits": "contents default_cache_dir texts",
    "batches.prompts": "PromptLoader build_prompts",
    "report": "Report data_report",
    "save": "remove_cache save_mixture",
    "rows.example": "Example",
    "schema": "Column Schema Value",
    "sources": "read_rows",
    "tokens.bpe": "train_bpe",
    "rows.documents": "documents",
}
_NAMES = {name: owner for owner, names in _OWNERS.items() for name in names.split()}

__all__ = [
    "Column",
    "DataError",
    "Example",
    "Inform",
    "Loader",
    "Media",
    "Mixture",
    "Packing",
    "PromptLoader",
    "Report",
    "Saving",
    "Schema",
    "StreamLoader",
    "Tokenization",
    "Value",
    "build_loader",
    "build_prompts",
    "check_names",
    "contents",
    "data_report",
    "default_cache_dir",
    "documents",
    "idle_options",
    "pack",
    "read_rows",
    "remove_cache",
    "save_mixture",
    "texts",
    "train_bpe",
    "without_tokens",
]


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        from ed_data.errors import did_you_mean

        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}{did_you_mean(name, _NAMES)}"
        )
    import pkgutil

    value = pkgutil.resolve_name(f"{__name__}.{_NAMES[name]}:{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})
