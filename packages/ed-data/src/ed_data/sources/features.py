"""The types that `datasets` stores in the schema of a table, which arrow itself does not know.

A column of the type `Json` is stored as JSON text, also inside of lists and structs. The metadata
of the table names the type, so each reader of a table decodes the column as `datasets` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ed_data.schema import Row

Decode = Callable[[Any], Any]


def read_features(metadata: Mapping[bytes, bytes] | None) -> Mapping[str, Any]:
    """Return the features by column in the metadata of a table; empty without features."""
    try:
        stored = json.loads((metadata or {}).get(b"huggingface", b"{}"))
        features = stored["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    return features if isinstance(features, Mapping) else {}


def row_decoder(features: Mapping[str, Any]) -> Callable[[Row], Row]:
    """Return a function that decodes the columns of a row with JSON texts.

    Args:
        features: features by column, as `datasets` writes them.
    """
    decoders = {name: decode for name, feature in features.items() if (decode := _decoder(feature))}
    if not decoders:
        return lambda row: row

    def decode_row(row: Row) -> Row:
        return {
            name: decoders[name](value) if name in decoders else value
            for name, value in row.items()
        }

    return decode_row


def _decoder(feature: object) -> Decode | None:
    """Return the decoder of a feature; None if nothing in it is JSON text."""
    if isinstance(feature, list) and len(feature) == 1:
        return _list_decoder(_decoder(feature[0]))
    if not isinstance(feature, Mapping):
        return None
    kind = feature.get("_type")
    if kind == "Json":
        return _decode_json
    if kind in ("List", "LargeList", "Sequence"):
        inner = feature.get("feature")
        if kind == "Sequence" and isinstance(inner, Mapping) and "_type" not in inner:
            # The old type stores a list of structs as a struct of lists.
            inner = {
                name: {"_type": "List", "feature": inner_feature}
                for name, inner_feature in inner.items()
            }
            return _struct_decoder(inner)
        return _list_decoder(_decoder(inner))
    return None if isinstance(kind, str) else _struct_decoder(feature)


def _list_decoder(decode: Decode | None) -> Decode | None:
    if decode is None:
        return None
    return lambda value: None if value is None else [decode(item) for item in value]


def _struct_decoder(fields: Mapping[str, Any]) -> Decode | None:
    decoders = {name: decode for name, feature in fields.items() if (decode := _decoder(feature))}
    if not decoders:
        return None

    def decode_struct(value: object) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {
            name: decoders[name](item) if name in decoders else item for name, item in value.items()
        }

    return decode_struct


def _decode_json(value: object) -> Any:
    return json.loads(value) if isinstance(value, str | bytes) else value
