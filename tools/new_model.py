"""Create a model family: a copy of the nearest family under a new name, and its entry point.

    uv run python -m tools.new_model my_model --like llama
    uv run python -m tools.new_model my_model --like llama --package ../my-models

The first form adds `families/my_model.py`, tiny configurations and an entry point. The second form
adds the family to a separate package, which is created if necessary, with an entry point and a test
file with the conformance suite. docs/adding_models.md describes the next steps.
"""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.workspace import ROOT, read_toml

MODELS = ROOT / "packages/ed-models"
FAMILIES = MODELS / "src/ed_models/families"
CASES = ROOT / "tests/conformance/cases"
SECTION = '[project.entry-points."easydel.models"]'

PYPROJECT = """\
[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = [
  "ed-infra>=0.1,<0.2",
  "ed-layers>=0.1,<0.2",
  "ed-models>=0.1,<0.2",
  "transformers>=5.23,<6",
]

# A family is found by its model_type; installing this package is all that is needed.
{section}

[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["src/{module}"]
"""

CONFTEST = '''\
"""Eight simulated devices; this must be set before jax is imported."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
'''

TEST = '''\
"""Each family of this package passes the conformance suite."""

import pytest
from ed_models.conformance import AGAINST_TORCH, CHECKS, Cases, Subject, subjects
{cases}

@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("subject", subjects({{"{model_type}": CASES}}), ids=str)
def test_conformance(subject: Subject, check: str) -> None:
    if check not in subject.checks:
        pytest.skip("the task has no such check")
    if check in AGAINST_TORCH and not subject.is_in_transformers:
        pytest.skip("transformers has no such model to compare with")
    CHECKS[check](subject)
'''


class WrongName(ValueError):
    """The name of the family or of the package is invalid, or the family to copy does not exist."""


@dataclass(frozen=True)
class Family:
    """A family to create.

    Attributes:
        model_type: `model_type` of the new family in config.json.
        like: `model_type` of the family to copy.
        known: Whether `transformers` has a configuration of the new model type.
        stem: Prefix of the new class names: `My` of `my_model`, for `MyModel`.
    """

    model_type: str
    like: str
    known: bool
    stem: str

    @classmethod
    def of(cls, model_type: str, like: str) -> Family:
        """Check the names.

        Raises:
            WrongName: A name is invalid.
        """
        from ed_infra import registry
        from ed_infra.errors import did_you_mean
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        is_name = re.fullmatch(r"[a-z][a-z0-9_]*", model_type) and not keyword.iskeyword(model_type)
        is_name = is_name and model_type != "model"
        if not is_name:
            raise WrongName(
                f"{model_type!r} is not a valid family name: use lower-case letters, digits and _, "
                "because it is the name of a Python module"
            )
        there = sorted(f.stem for f in FAMILIES.glob("*.py") if f.stem != "__init__")
        if model_type in there or model_type in registry.model_types():
            raise WrongName(f"the family {model_type!r} exists already: choose another name")
        if like not in there:
            raise WrongName(
                f"no family {like!r} to copy{did_you_mean(like, there)} (known: {', '.join(there)})"
            )
        known = CONFIG_MAPPING_NAMES.get(model_type)
        stem = "".join(part.capitalize() for part in model_type.split("_")).removesuffix("Model")
        stem = known.removesuffix("Config") if known else stem
        return cls(model_type, like, known is not None, stem)

    def source(self) -> str:
        """Return the text of the new family's file."""
        text = (FAMILIES / f"{self.like}.py").read_text(encoding="utf-8")
        old = re.search(r"^class (\w+)Config\(", text, re.MULTILINE)
        assert old is not None, f"families/{self.like}.py has no configuration class"
        _, docstring, body = text.split('"""', 2)
        # transformers' own classes keep their names, except a configuration of the new type.
        theirs = f"transformers.{old[1]}Config"
        body = re.sub(rf"(?<!transformers\.)\b{old[1]}(?=[A-Z])", self.stem, body)
        if self.known:
            body = body.replace(theirs, f"transformers.{self.stem}Config")
        for before, after in (
            (f'register_config("{self.like}")', f'register_config("{self.model_type}")'),
            (f'model_type = "{self.like}"', f'model_type = "{self.model_type}"'),
            (f'model_type="{self.like}"', f'model_type="{self.model_type}"'),
        ):
            assert before in body, f"families/{self.like}.py lacks {before}"
            body = body.replace(before, after)
        special = docstring.strip().split("\n\n")[1]
        numbers = (
            f"Numbers follow Hugging Face's `modeling_{self.model_type}.py`; parameter names are "
            "its names."
            if self.known
            else "`transformers` has no model of this type to compare with."
        )
        head = (
            f"{self.stem}: a copy of {self.like}; describe the differences in this line.\n\n"
            f"{special}\n\n{numbers}\n"
        )
        return f'"""{head}"""{body}'

    def cases(self) -> str:
        """Return the tiny configurations of the source family, without the imports."""
        text = (CASES / f"{self.like}.py").read_text(encoding="utf-8")
        return text.split("import Cases\n", 1)[1]


def with_entry_point(pyproject: str, model_type: str, module: str) -> str:
    """Return the text of a pyproject file with the line of a family, sorted."""
    line = f'{model_type} = "{module}"'
    if SECTION not in pyproject:
        return f"{pyproject.rstrip()}\n\n{SECTION}\n{line}\n"
    before, rest = pyproject.split(SECTION, 1)
    own, bracket, after = rest.partition("\n[")  # the next table of the file
    entries = sorted({*filter(None, own.splitlines()), line})
    tail = f"\n{bracket}{after}" if bracket else "\n"
    return f"{before}{SECTION}\n" + "\n".join(entries) + tail


def add_to_ed_models(family: Family) -> list[Path]:
    """Add the family to ed-models, and return the written files."""
    target, pyproject = FAMILIES / f"{family.model_type}.py", MODELS / "pyproject.toml"
    target.write_text(family.source(), encoding="utf-8")
    cases = CASES / target.name
    doc = f'"""Tiny configurations of {family.model_type}."""'
    head = f"{doc}\n\nfrom ed_models.conformance import Cases\n"
    cases.write_text(head + family.cases(), encoding="utf-8")
    text = pyproject.read_text(encoding="utf-8")
    module = f"ed_models.families.{family.model_type}"
    pyproject.write_text(with_entry_point(text, family.model_type, module), encoding="utf-8")
    return [target, cases, pyproject]


def add_to_package(family: Family, folder: Path) -> list[Path]:
    """Add the family to a package, which is created if necessary, and return the written files.

    Raises:
        WrongName: The name of the folder is not a package name, or the folder is not a package.
    """
    module = folder.name.replace("-", "_")
    if not module.isidentifier():
        raise WrongName(f"{folder.name!r} is not a valid package name: use letters, digits and -")
    pyproject = folder / "pyproject.toml"
    if folder.exists() and any(folder.iterdir()) and not pyproject.is_file():
        raise WrongName(f"{folder} is not empty and has no pyproject.toml: choose another folder")
    source = folder / "src" / module
    target = source / f"{family.model_type}.py"
    if target.exists():
        raise WrongName(f"{target} exists already")
    files = {
        pyproject: PYPROJECT.format(name=folder.name, module=module, section=SECTION),
        folder / "README.md": f"# {folder.name}\n\nModel families for EasyDeL.\n",
        source / "__init__.py": '"""Model families, found by their entry points."""\n',
        folder / "tests/conftest.py": CONFTEST,
        folder / f"tests/test_{family.model_type}.py": TEST.format(
            model_type=family.model_type, cases=family.cases()
        ),
        target: family.source(),
    }
    written = []
    for path, text in files.items():
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            written.append(path)
    text = pyproject.read_text(encoding="utf-8")
    line = with_entry_point(text, family.model_type, f"{module}.{family.model_type}")
    pyproject.write_text(line, encoding="utf-8")
    assert family.model_type in read_toml(pyproject)["project"]["entry-points"]["easydel.models"]
    return written


def next_steps(family: Family, folder: Path | None) -> str:
    """Return the next commands; all of them run in this clone.

    Args:
        family: The family that was written.
        folder: The folder of the package as the user named it, or None for ed-models.
    """
    if folder is not None:
        return (
            "next: edit the family; then, in this clone:\n"
            f"  uv pip install -e {folder}    (the entry point is found once installed)\n"
            f"  uv run --no-sync pytest {folder}/tests    (the conformance suite)"
        )
    return (
        "next: edit the family, its first line and its tiny configurations; then\n"
        "  uv sync --reinstall-package ed-models    (its entry point is found once installed)\n"
        f"  uv run pytest tests/conformance -m '' -k {family.model_type}\n"
        f"  uv run python -m tests.conformance.results {family.model_type}\n"
        "  uv run python -m tools.model_table"
    )


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, write the files and print the next commands; 2 for a wrong name."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.new_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help="model_type of the new family")
    parser.add_argument("--like", default="llama", help="the family to copy")
    parser.add_argument("--package", type=Path, help="folder of a separate package")
    given = parser.parse_args(arguments)
    try:
        family = Family.of(given.name, given.like)
        folder = given.package.resolve() if given.package else None
        written = add_to_package(family, folder) if folder else add_to_ed_models(family)
    except WrongName as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(f"wrote {path}" for path in written))
    print(next_steps(family, given.package))
    return 0


if __name__ == "__main__":
    sys.exit(main())
