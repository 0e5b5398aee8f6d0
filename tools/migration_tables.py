"""Write the tables of docs/migrate: the names of other programs, and their places here.

    uv run python -m tools.migration_tables            rewrite the tables
    uv run python -m tools.migration_tables --check    exit 1 if a table is outdated

The places come from the tables that decide about these names: the rules of `ed_elarge.migration`,
`ed_trainers.options.other_names`, the aliases of the option classes, `easydel._table` and the
modules of `EasyLM`. A documented name without a place is an error.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from EasyLM import SOURCES
from ed_elarge.config import other_files
from ed_elarge.migration.axolotl import AXOLOTL_RULES
from ed_elarge.migration.conversion import KeyRule
from ed_elarge.migration.llama_factory import LLAMA_FACTORY_RULES
from ed_elarge.migration.trl_arguments import TRL_METHODS
from ed_elarge.migration.trl_files import TRL_RULES
from ed_elarge.migration.unsloth import UNSLOTH_RULES
from ed_trainers.arguments import ARGUMENTS
from ed_trainers.options import other_names

from tools import easydel_names, pages
from tools.easydel_names import instead
from tools.pages import heading, row
from tools.workspace import ROOT

FOLDER = ROOT / "docs/migrate"
BEGIN, END = "<!-- tools/migration_tables.py -->\n", "<!-- end -->\n"


def names_table(program: str, names: Iterable[str], *, of_trainer: bool = True) -> list[str]:
    """Return the table of the keys of one program.

    Args:
        program: Heading of the first column.
        names: The keys.
        of_trainer: Whether the keys are options of a trainer, so that "the same" is clear.

    Raises:
        LookupError: A key has no place.
    """
    lines = heading(program, "here")
    for name in dict.fromkeys(names):
        place = other_files.place(name)
        if place is None:
            raise LookupError(f"{name} of {program} has no place: add it to other_names.py")
        own = of_trainer and place == f"trainer.{name}"
        lines.append(row(f"`{name}`", "the same" if own else instead(marked(place))[0]))
    return lines


def marked(place: str) -> str:
    """Mark the code of a place, if the place is only a path of keys."""
    return f"`{place}`" if re.fullmatch(r"[\w.]+", place) else place


def hugging_face() -> list[str]:
    """Return the fields of `transformers.TrainingArguments`, from its source."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("transformers is not installed: run `uv sync`")
    tree = ast.parse((Path(spec.origin).parent / "training_args.py").read_text("utf-8"))
    named = (node for node in tree.body if isinstance(node, ast.ClassDef))
    (cls,) = (node for node in named if node.name == "TrainingArguments")
    return [
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def trl_aliases() -> dict[str, str]:
    """Return the other spellings of keys of single methods, without those of every method."""
    shared = set(ARGUMENTS["sft"].ALIASES)
    return {
        other: name
        for options in ARGUMENTS.values()
        for other, name in options.ALIASES.items()
        if other not in shared
    }


def trl_arguments(shared: Collection[str]) -> list[str]:
    """Return the arguments of TRL's configurations, without those of `TrainingArguments`."""
    names = dict.fromkeys(name for one in TRL_METHODS.values() for name in one.defaults)
    return [name for name in names if name not in shared]


def trl() -> str:
    """Return the tables of docs/migrate/trl.md."""
    theirs = hugging_face()
    older = [name for name in other_names.HUGGING_FACE if name not in theirs]
    lines = ["## `TrainingArguments`", "", *names_table("`TrainingArguments`", theirs), ""]
    lines += ["Names of earlier versions:", "", *names_table("`TrainingArguments`", older), ""]
    lines += ["## Configurations of TRL", ""]
    names = (*other_names.TRL, *trl_aliases(), *trl_arguments(theirs))
    lines += names_table("`SFTConfig`, `DPOConfig`, …", names)
    lines += ["", "## The model and the data of TRL's command line", ""]
    listed = {*theirs, *older, *names}
    more = [
        name
        for name, rule in TRL_RULES.items()
        if name not in listed and not rule.place.startswith("trainer.")
    ]
    lines += names_table("`trl METHOD --config FILE`", more, of_trainer=False)
    return "\n".join(lines) + "\n"


def axolotl() -> str:
    """Return the table of docs/migrate/axolotl.md."""
    names = {*AXOLOTL_RULES, *other_names.AXOLOTL}
    return "\n".join(names_table("Axolotl", sorted(names), of_trainer=False)) + "\n"


def rules_table(program: str, rules: Mapping[str, KeyRule]) -> str:
    """Return the table of the rules of one program."""
    lines = heading(program, "here")
    lines += [row(f"`{key}`", instead(marked(rules[key].place))[0]) for key in sorted(rules)]
    return "\n".join(lines) + "\n"


def llama_factory() -> str:
    """Return the table of docs/migrate/llamafactory.md."""
    return rules_table("LLaMA-Factory", LLAMA_FACTORY_RULES)


def unsloth() -> str:
    """Return the table of docs/migrate/unsloth.md."""
    return rules_table("Unsloth", UNSLOTH_RULES)


def easylm() -> str:
    """Return the table of docs/migrate/easylm.md: the files of EasyLM's document."""
    text = (easydel_names.DOCUMENTS / "003.txt").read_text("utf-8")
    lines = heading("EasyLM", "here")
    for name in dict.fromkeys(re.findall(r"\b(\w+)\.py\b", text)):
        if name == "__init__":
            continue
        paths = [path for path in SOURCES if path.endswith(f".{name}")]
        if not paths:
            raise LookupError(f"{name}.py of EasyLM's document has no module in EasyLM.SOURCES")
        for path in paths:
            lines += [row(f"`{path}{cls}`", place) for cls, place in _exports(SOURCES[path])]
    return "\n".join(lines) + "\n"


def _exports(source: str) -> list[tuple[str, str]]:
    """Return what a module of the import package `EasyLM` exports, and where it is defined."""
    exports = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom):
            for one in node.names:
                name = "" if one.asname == "main" else f".{one.name}"
                exports.append((name, f"`{node.module}.{one.name}`, the same import path"))
    return exports


#: Page -> its generated part.
PAGES = {
    FOLDER / "easydel.md": easydel_names.tables,
    FOLDER / "easylm.md": easylm,
    FOLDER / "axolotl.md": axolotl,
    FOLDER / "llamafactory.md": llama_factory,
    FOLDER / "unsloth.md": unsloth,
    FOLDER / "trl.md": trl,
}


def page(path: Path) -> str:
    """Return a page with new tables."""
    return pages.with_part(path.read_text("utf-8"), BEGIN, END, PAGES[path]())


if __name__ == "__main__":
    sys.exit(pages.main("migration_tables", list(PAGES), page))
