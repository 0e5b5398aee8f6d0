"""Try what a person brings from EasyDeL, and print the table of what works.

    uv run python -m tools.easydel_beside CHECKOUT
    EASYDEL_PYTHON=PYTHON uv run python -m tools.easydel_beside CHECKOUT [--folders FOLDER]

CHECKOUT is a work tree or a git directory of EasyDeL's repository. `EASYDEL_PYTHON` is the Python
of an environment with EasyDeL and torch; without it, the names are not counted. FOLDER contains
what `tools/easydel/save_folders.py` writes; without FOLDER, `EASYDEL_PYTHON` writes the folders.
`--rows` selects rows of the table by a part of their titles.

Only paths and names of the hub are replaced, by tiny models and rows that the tool writes. Each
configuration passes `elarge FILE --dry-run`. Each block and script runs without an error. The first
error of each failure is printed below the table.

How the rows are counted:

- Blocks of documents: run files with a model and actions, and Python blocks that import `easydel`
  and define every name that they use. The pages of `docs/easydata` are about another library.
  With `EASYDEL_PYTHON`, the line of a failed block also has the error of EasyDeL itself.
- Blocks of the README: every Python block with the word `easydel`, also those that only show a
  form with `...` in the place of arguments.
- Statements about base modules: those of `docs/infra/base_module.md` and of the overview in the
  same folder, with the statements in the bodies of classes and functions.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import io
import json
import os
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import yaml

from tools import easydel_folders, easydel_python

#: Parts of the repository that the tool reads.
PARTS = ("tests/elarge_configs", "examples", "docs", "README.md")
_RUN_FILE = re.compile(r"^( *)```yaml\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
#: Sections of models, and the folder that replaces each.
MODELS = {
    "model": "model",
    "teacher": "model",
    "teacher_model": "model",
    "reference_model": "model",
    "reward_model": "reward",
}


class Trial(NamedTuple):
    """A configuration of EasyDeL.

    Attributes:
        name: Its file.
        config: The sections and actions.
        error: Why the configuration cannot be read; empty otherwise.
    """

    name: str
    config: dict[str, object]
    error: str = ""


class _Captured(BaseException):
    """Ends an example at its configuration."""


def materialize(checkout: Path, folder: Path) -> Path:
    """Write the parts of a repository to a folder, from a work tree or a git directory."""
    for part in PARTS:
        if (checkout / part).is_dir():
            shutil.copytree(checkout / part, folder / part)
        elif (checkout / part).exists():
            shutil.copyfile(checkout / part, folder / part)
    if any(folder.iterdir()):
        return folder
    command = ["git", "-C", str(checkout), "archive", "HEAD", *PARTS]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def run_files(root: Path) -> Iterator[Trial]:
    """Yield the run files of the tests."""
    for path in sorted((root / "tests/elarge_configs").glob("*.yaml")):
        yield Trial(path.name, yaml.safe_load(path.read_text("utf-8")))


def documents(root: Path) -> Iterator[Trial]:
    """Yield the complete run files in the documents."""
    for path in sorted((root / "docs").rglob("*.md")):
        text = path.read_text("utf-8")
        for match in _RUN_FILE.finditer(text):
            indent, block = match.groups()
            block = re.sub(f"^{indent}", "", block, flags=re.MULTILINE)
            config = yaml.safe_load(block)
            if isinstance(config, dict) and _is_complete(config):
                line = text[: match.start()].count("\n") + 1
                yield Trial(f"{path.relative_to(root)}:{line}", config)


def _sections_of(config: dict[str, object]) -> dict[str, object]:
    """Return the sections of a run file, which may be below one key."""
    for name in ("config", "elarge_model", "elm"):
        if isinstance(inner := config.get(name), dict):
            return inner
    return config


def _is_complete(config: dict[str, object]) -> bool:
    """Return whether a block of a document is a whole run file."""
    sections, actions = _sections_of(config), str(config.get("actions", ""))
    trains = "'train'" not in actions or {"trainer", "mixture"} <= sections.keys()
    return "actions" in config and "model" in sections and trains


def examples(root: Path) -> Iterator[Trial]:
    """Yield the configurations that the examples pass to `eLargeModel`."""
    from ed_elarge.model import eLargeModel

    captured: list[dict[str, object]] = []

    def capture(self: object, config: dict[str, object]) -> None:
        captured.append(config)
        raise _Captured

    modules = {"eformer": types.ModuleType("eformer"), "eformer.aparser": _argument_parser()}
    modules["datasets"] = mock.MagicMock()
    # Helpers of the scripts, which do not change the configurations.
    helpers = ("easydel.infra.elarge.processing", "easydel.trainers.agentic_moshpit")
    modules |= {name: mock.MagicMock() for name in helpers if not _can_import(name)}
    replaced = easydel_python.replace_modules(modules)
    with replaced, mock.patch.object(eLargeModel, "__init__", capture):
        for path in sorted((root / "examples").rglob("*.py")):
            captured.clear()
            error = ""
            with mock.patch.object(sys, "argv", [str(path)]), contextlib.suppress(_Captured):
                try:
                    runpy.run_path(str(path), run_name="__main__")
                except Exception as problem:  # a script raises arbitrary errors
                    error = f"{type(problem).__name__}: {problem}"
            config = captured[0] if captured else {}
            yield Trial(f"{path.relative_to(root)}", config, error)


def _can_import(name: str) -> bool:
    with contextlib.suppress(ImportError, AttributeError):
        pkgutil.resolve_name(name)
        return True
    return False


def _argument_parser() -> types.ModuleType:
    """Return a module whose parser returns the defaults of a data class."""

    class DataClassArgumentParser:
        def __init__(self, kind: type, **keywords: object) -> None:
            self.kind = kind

        def parse_args_into_dataclasses(self) -> tuple[object, ...]:
            return (self.kind(),)

    module = types.ModuleType("eformer.aparser")
    vars(module)["DataClassArgumentParser"] = DataClassArgumentParser
    return module


def write_stand_ins(folder: Path) -> None:
    """Write a tiny language model, a tiny reward model, and preference rows."""
    from ed_data.tokens.bpe import train_bpe
    from ed_infra.testing import english_topics, tiny_llama
    from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
    from ed_models.tasks.classification import SequenceClassifier

    tokenizer = train_bpe(english_topics().values(), vocab_size=320)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    fields = tiny_llama(vocab_size=len(tokenizer), num_hidden_layers=2)
    del fields["model_type"]
    scorer = SequenceClassifier.for_family(LlamaForCausalLM)
    for name, cls in (("model", LlamaForCausalLM), ("reward", scorer)):
        labels = {"num_labels": 1} if name == "reward" else {}
        values = {**fields, **labels, "max_position_embeddings": 65536}
        config = LlamaConfig(**values, sharding_axis_dims=(1, 1, 1, 1, 1))
        cls.create(config, seed=0).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = []
    for number in range(64):
        question = {"role": "user", "content": f"What is {number} and 1?"}
        answers = (
            {"role": "assistant", "content": text} for text in (f"It is {number + 1}.", "No idea.")
        )
        chosen, rejected = ([question, answer] for answer in answers)
        rows.append({"chosen": chosen, "rejected": rejected, "gold": str(number + 1)})
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def with_stand_ins(config: dict[str, object], folder: Path) -> dict[str, object]:
    """Return a configuration whose paths and names of the hub are replaced."""
    plain = json.loads(json.dumps(config, default=_plain))
    sections = _sections_of(plain)
    for name, stand_in in MODELS.items():
        if isinstance(section := sections.get(name), dict):
            named = {"name_or_path", "tokenizer"} & section.keys()
            section.update(dict.fromkeys(named, str(folder / stand_in)))
    given = sections.get("mixture")
    mixture = given if isinstance(given, dict) else {}
    for inform in (*mixture.get("informs", ()), *mixture.get("eval_informs", ())):
        field = inform.get("content_field", "chosen")
        rows = "rows" if field in ("chosen", "rejected") else f"rows_{field}"
        inform |= {"type": "json", "data_files": str(folder / f"{rows}.jsonl"), "split": "train"}
        if rows != "rows":
            names = {field, *inform.get("format_fields", {}), *inform.get("additional_fields", ())}
            row = dict.fromkeys(sorted(names), "What is the sum of one and two?")
            text = f"{json.dumps(row)}\n" * 64
            (folder / f"{rows}.jsonl").write_text(text)
    if "cache_dir" in mixture:
        mixture["cache_dir"] = str(folder / "cache")
    if isinstance(trainer := sections.get("trainer"), dict):
        trainer["save_directory"] = str(folder / "run")
    plain.setdefault("actions", ["validate"])
    return plain


def _plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)


def try_dry_run(trial: Trial, folder: Path) -> str:
    """Return the first error of a dry run, or an empty text."""
    from ed_elarge.command.runs import run_file

    if trial.error:
        return trial.error
    path = folder / "trial.json"
    path.write_text(json.dumps(with_stand_ins(trial.config, folder), indent=1))
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = run_file(str(path), dry_run=True)
    if code == 0:
        return ""
    lines = [line for line in errors.getvalue().splitlines() if "warning:" not in line]
    failures = [line for line in lines if line.startswith(str(path)) or "error" in line.lower()]
    return "; ".join((failures or lines)[:3])


#: Name of the trial of the documents -> its configurations.
ROWS: dict[str, Callable[[Path], Iterator[Trial]]] = {
    "run files of tests/elarge_configs": run_files,
    "configurations of examples": examples,
    "run files in docs": documents,
}


class Count(NamedTuple):
    """The results of a row of the table.

    Attributes:
        good: The number of things that work.
        total: The number of things.
        errors: A line for each failure.
        unknown: Why the row is not counted; empty otherwise.
    """

    good: int = 0
    total: int = 0
    errors: Sequence[str] = ()
    unknown: str = ""

    def __str__(self) -> str:
        return self.unknown or f"{self.good} of {self.total}"


def count_results(results: Mapping[str, str]) -> Count:
    """Count results, each with an error or an empty text."""
    failed = [f"{name}: {error[:300]}" for name, error in results.items() if error]
    return Count(len(results) - len(failed), len(results), failed)


class Trials:
    """The rows of the table.

    Args:
        root: The parts of the repository.
        folder: An empty folder to work in.
        folders: A folder with the folders of the original, or None.
        python: The interpreter of the original, or an empty text.
    """

    def __init__(self, root: Path, folder: Path, folders: Path | None, python: str) -> None:
        self.root, self.folder, self.folders, self.python = root, folder, folders, python
        self.rows: dict[str, Callable[[], Count]] = {
            "run files of `tests/elarge_configs`": lambda: self.count_dry_runs(run_files),
            "configurations of `examples`": lambda: self.count_dry_runs(examples),
            "complete blocks of its documents": self.count_documents,
            "scripts in the style of its README and tutorials": self.count_scripts,
            "folders that it saved": self.count_folders,
            "names of `import easydel as ed`": self.count_names,
            "blocks of its README": self.count_readme,
            "statements of its pages about base modules": self.count_statements,
        }

    def make_place(self, name: str) -> Path:
        """Return an empty folder."""
        place = self.folder / name
        place.mkdir()
        return place

    @cached_property
    def stand_ins(self) -> Path:
        """A folder with the models and rows of configurations."""
        place = self.make_place("stand_ins")
        write_stand_ins(place)
        return place

    @cached_property
    def models(self) -> Path:
        """A folder with the models of blocks and scripts."""
        place = self.make_place("models")
        easydel_python.write_models(place)
        return place

    def count_dry_runs(self, find: Callable[[Path], Iterator[Trial]]) -> Count:
        """Count configurations that pass a dry run."""
        return count_results(
            {one.name: try_dry_run(one, self.stand_ins) for one in find(self.root)}
        )

    def count_documents(self) -> Count:
        """Count the run files and the Python blocks of the documents."""
        files = {one.name: try_dry_run(one, self.stand_ins) for one in documents(self.root)}
        blocks = easydel_python.list_document_blocks(self.root)
        results = easydel_python.try_blocks(blocks, self.models, "document", together=False)
        failed = {name: blocks[name] for name, error in results.items() if error and self.python}
        for name, error in easydel_python.try_original(self.python, failed).items():
            results[name] = f"(EasyDeL itself: {error or 'no error'}) {results[name]}"
        return count_results(files | results)

    def count_scripts(self) -> Count:
        """Count the scripts of `tests/guides/easydel_scripts`."""
        return count_results(easydel_python.try_scripts(self.models))

    def count_folders(self) -> Count:
        """Count the folders with the weights of their source."""
        folders = self.folders
        if folders is None and not self.python:
            return Count(unknown="not counted: set EASYDEL_PYTHON, or pass --folders")
        if folders is None:
            folders = self.make_place("folders")
            easydel_folders.write_folders(folders, self.python)
        return count_results(easydel_folders.try_folders(folders))

    def count_names(self) -> Count:
        """Count the names of the original that exist here."""
        if not self.python:
            return Count(unknown="not counted: set EASYDEL_PYTHON")
        total, missing = easydel_python.count_names(self.python)
        lines = [f"{name}: {error}" for name, error in missing.items()]
        return Count(total - len(missing), total, lines)

    def count_readme(self) -> Count:
        """Count the blocks of the README that name `easydel`."""
        blocks = easydel_python.list_readme_blocks((self.root / "README.md").read_text("utf-8"))
        return count_results(
            easydel_python.try_blocks(blocks, self.models, "readme", together=True)
        )

    def count_statements(self) -> Count:
        """Count the statements, with those in the bodies of classes and functions."""
        statements = [
            statement
            for page in easydel_python.PAGES
            for statement in easydel_python.list_statements(
                (self.root / page).read_text("utf-8"), page
            )
        ]
        results = easydel_python.try_statements(statements, self.make_place("statements"))
        failed = [f"{one.name}: {error[:300]}" for one, error in results.items() if error]
        good = sum(one.size for one, error in results.items() if not error)
        return Count(good, sum(one.size for one in results), failed)


def main() -> int:
    """Print the table, and the first error of each failure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--folders", type=Path, help="folders that the original has saved")
    parser.add_argument("--rows", nargs="*", default=[], help="parts of titles of rows")
    arguments = parser.parse_args()
    details: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder, root = Path(name), Path(name) / "easydel"
        root.mkdir()
        materialize(arguments.checkout, root)
        python = os.environ.get("EASYDEL_PYTHON", "")
        trials = Trials(root, folder, arguments.folders, python)
        print("| what a person brings | works |\n| --- | --- |", flush=True)
        for title, run in trials.rows.items():
            if arguments.rows and not any(part in title for part in arguments.rows):
                continue
            count = run()
            print(f"| {title} | {count} |", flush=True)
            details += [f"{title}: {line}" for line in count.errors]
        print("\n".join(["", *details]))
    return int(bool(details))


if __name__ == "__main__":
    sys.exit(main())
