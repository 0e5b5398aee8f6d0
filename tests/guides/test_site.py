"""The site of mkdocs contains every page of docs/ and every public name, without dead links."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import site_pages
from tools.workspace import ROOT, packages

SOURCES = ("README.md", "docs", ".github", "tools/mkdocs.yml", "tools/site_pages.py")


def build(folder: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Build the site as CONTRIBUTING says."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "tools/mkdocs.yml"]
    command += ["--site-dir", str(target)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_navigation_lists_every_page_of_docs() -> None:
    listed = re.findall(
        r"^ +- (\S+\.md)$", (ROOT / "tools/mkdocs.yml").read_text("utf-8"), re.MULTILINE
    )
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    created = {*site_pages.PAGES, *(f"api/{p.name.replace('-', '_')}.md" for p in packages())}
    assert len(listed) == len(set(listed))
    assert set(listed) == pages | created


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.name)
def test_api_reference_lists_every_public_name(package) -> None:
    name = package.name.replace("-", "_")
    module = importlib.import_module(name)
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text("utf-8"))
    assert set(site_pages.public_names(tree)) == set(module.__all__)
    assert site_pages.api_page(name).count("\n::: ") == len(module.__all__)


def test_links_of_a_page_are_right_in_the_site() -> None:
    links = "[a](docs/yaml.md#x) [b](packages/ed-data/README.md) [c](no.md)"
    text = f"{links}\n```bash skip='x'\n[d](e)\n```\n"
    assert site_pages.for_site(text, "index.md", None) == (
        "[a](yaml.md#x) b [c](no.md)\n```bash\n[d](e)\n```\n"
    )
    text = "[a](../data.md) [b](../../README.md) [c](../../LICENSE)"
    shown = site_pages.for_site(text, "tasks/lora.md", "https://example.org/r")
    assert shown == "[a](../data.md) [b](../index.md) [c](https://example.org/r/blob/main/LICENSE)"


@pytest.mark.nightly
def test_site_has_every_public_name_and_no_dead_link(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    for package in packages():
        name = package.name.replace("-", "_")
        html = (tmp_path / "api" / name / "index.html").read_text("utf-8")
        tree = ast.parse((package.folder / "src" / name / "__init__.py").read_text("utf-8"))
        names = site_pages.public_names(tree)
        assert [n for n, module in names.items() if f'id="{module}.{n}"' not in html] == []


@pytest.mark.nightly
@pytest.mark.parametrize("link", ["[x](gone.md)", "[x](yaml.md#gone)", "[x](../gone.py)"])
def test_dead_link_is_an_error_of_the_site(link: str, tmp_path: Path) -> None:
    for source in SOURCES:
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        (tmp_path / source).parent.mkdir(exist_ok=True)
        copy(ROOT / source, tmp_path / source)
    for outside in ("packages", "examples", "tests", "AGENTS.md", "LICENSE", "SECURITY.md"):
        (tmp_path / outside).symlink_to(ROOT / outside)
    page = tmp_path / "docs/plan.md"
    page.write_text(f"{page.read_text('utf-8')}\n{link}\n", encoding="utf-8")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1 and "gone" in warnings[0], done.stderr
