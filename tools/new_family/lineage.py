"""The parents of a model type, read from the modular file of `transformers`.

A modular file states how a model differs from others: a class with an empty body equals its parent,
and other classes replace methods.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

#: The part of a class name after the stem -> the part of the model in a sentence.
PARTS = {
    "Attention": "attention",
    "MLP": "feed-forward",
    "MoE": "experts",
    "SparseMoeBlock": "experts",
    "Experts": "experts",
    "TopkRouter": "router",
    "TopKRouter": "router",
    "Router": "router",
    "RMSNorm": "norm",
    "LayerNorm": "norm",
    "RotaryEmbedding": "rotary positions",
    "DecoderLayer": "layer",
    "Model": "body",
    "ForCausalLM": "head",
}


@dataclass(frozen=True)
class Part:
    """One class of a modular file.

    Attributes:
        name: name of the class.
        kind: the part of the model, a value of `PARTS`.
        parent_type: model type of the parent class.
        changes: the methods that replace those of the parent; empty = equal to the parent.
    """

    name: str
    kind: str
    parent_type: str
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Lineage:
    """The parents of a model type.

    Attributes:
        parts: classes of the modular file with a parent in another type.
        authors: the first holder of the copyright, and the year, such as `"Arcee AI 2025"`.
        other_base: the type whose classes the model has, if it has none of its own.
    """

    parts: tuple[Part, ...]
    authors: str
    other_base: str | None = None

    def find_parent(self, kind: str) -> Part | None:
        """Return the class of a part of the model."""
        return next((part for part in self.parts if part.kind == kind), None)

    @property
    def base(self) -> str | None:
        """The model type that is the parent of most parts, with the layer and the body first."""
        if self.other_base is not None:
            return self.other_base
        order = [
            p.parent_type for kind in ("layer", "body", "head") if (p := self.find_parent(kind))
        ]
        counts = {name: sum(p.parent_type == name for p in self.parts) for name in order}
        return max(counts, key=lambda name: counts[name]) if counts else None

    def describe(self) -> list[str]:
        """Return a line for each part: its parent, and the changed methods."""
        return [
            f"{part.name}: {part.parent_type}'s {part.kind}, "
            + (f"changed: {', '.join(part.changes)}" if part.changes else "equal")
            for part in self.parts
        ]


def read_lineage(modeling_file: Path, stem: str) -> Lineage:
    """Read the modular file beside a modeling file; without one, only the authors are known.

    Args:
        modeling_file: path of `modeling_*.py`.
        stem: prefix of the class names, such as `Arcee`.
    """
    modular = modeling_file.with_name(modeling_file.name.replace("modeling_", "modular_"))
    text = (modular if modular.is_file() else modeling_file).read_text(encoding="utf-8")
    parts: list[Part] = []
    if modular.is_file():
        tree = ast.parse(text)
        types = {
            alias.asname or alias.name: node.module.split(".")[0]
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.level == 2 and node.module
            for alias in node.names
        }
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and (part := _read_class(node, stem, types)):
                parts.append(part)
    return Lineage(tuple(parts), read_authors(text))


def _read_class(node: ast.ClassDef, stem: str, types: dict[str, str]) -> Part | None:
    kind = PARTS.get(node.name.removeprefix(stem))
    parents = [types[b.id] for b in node.bases if isinstance(b, ast.Name) and b.id in types]
    if kind is None or not parents:
        return None
    functions = [f for f in node.body if isinstance(f, ast.FunctionDef)]
    changes = tuple(f.name for f in functions if not _calls_only_super(f))
    return Part(node.name, kind, parents[0], changes)


def _calls_only_super(function: ast.FunctionDef) -> bool:
    """Return whether a method only calls that of the parent, as methods with a docstring do."""
    body = [
        node
        for node in function.body
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    return len(body) == 1 and ast.unparse(body[0]).startswith("return super()")


def read_authors(text: str) -> str:
    """Return the first holder of the copyright of a file, and the year."""
    found = re.search(r"Copyright (?:\(c\) )?(\d{4}),? (?:The |the )?([^\n]*)", text, re.IGNORECASE)
    if found is None:
        return ""
    holder = re.split(r",? and |, | team|\. All|\(", found[2])[0]
    holder = holder.strip().rstrip(".")
    return f"{holder} {found[1]}" if holder and "HuggingFace" not in holder else found[1]


def follow_parents(model_type: str, known: set[str], find_file: Path) -> list[str]:
    """Return the chain of base types from a type to the first one in `known`.

    Args:
        model_type: the type whose modular file is read first.
        known: model types of this project.
        find_file: the folder `models` of transformers.
    """
    chain, name = [model_type], model_type
    while len(chain) < 8:
        modeling = find_file / name / f"modeling_{name}.py"
        if not modeling.is_file():
            break
        stem = _find_stem(modeling)
        base = read_lineage(modeling, stem).base
        if base is None or base in chain:
            break
        chain.append(base)
        if base in known:
            break
        name = base
    return chain


def _find_stem(modeling: Path) -> str:
    found = re.search(r"^class (\w+?)(?:DecoderLayer|Attention)\b", modeling.read_text(), re.M)
    return found[1] if found else ""
