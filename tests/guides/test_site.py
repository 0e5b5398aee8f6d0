"""The site of mkdocs contains every page of docs/ and every public name, without dead links."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from mkdocs.exceptions import PluginError

from tests.command_pictures import read_screen
from tests.playground import CHROMIUM, browser, until
from tools import site_pages
from tools.workspace import ROOT, packages

SOURCES = (
    *("README.md", "docs", ".github", "tools/mkdocs.yml", "tools/site_pages.py"),
    "tools/site_theme",
)


def build(folder: Path, target: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Build the site as CONTRIBUTING says."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "tools/mkdocs.yml"]
    command += ["--site-dir", str(target)]
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


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


def test_pictures_of_the_pages_are_small_and_shown() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    shown = {
        (page.parent / link).resolve()
        for page in pages
        for link in re.findall(r"\]\(([^)\s]+\.png)\)", page.read_text("utf-8"))
    }
    pictures = set(ROOT.glob("docs/**/*.png"))
    assert shown == pictures
    assert [picture.name for picture in pictures if picture.stat().st_size > 150_000] == []


def test_screen_of_a_terminal_has_the_last_text_of_each_line() -> None:
    bar = "\r\x1b[2Kstep 1\r\n\x1b[2Keval"  # a bar of two lines, drawn again
    output = f"first\r\n{bar}\r\x1b[2K\x1b[1A\x1b[2K\x1b[32mstep 2\x1b[0m\r\nlast\r\n\r\n\x1b[?25h"
    assert read_screen(output) == ["first", "\x1b[32mstep 2\x1b[0m", "last"]


def test_versions_of_the_site_are_listed_with_the_newest_release_first(tmp_path: Path) -> None:
    for name in ("0.9.0", "main", "0.10.0", "0.10.0rc1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").touch()
    (tmp_path / "unfinished").mkdir()
    site_pages.write_versions(tmp_path)
    names = json.loads((tmp_path / "versions.json").read_text())
    assert names == ["0.10.0rc1", "0.10.0", "0.9.0", "main"]
    assert "url=0.10.0rc1/index.html" in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize("version", ["../other", "a/b", "-x", "0.1 "])
def test_version_of_the_site_is_one_word(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_VERSION", version)
    with pytest.raises(PluginError, match="must be a word"):
        site_pages.on_config(SimpleNamespace(extra={}, site_dir="site"))


@pytest.mark.nightly
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_page_of_a_version_leads_to_the_others_and_finds_words(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path, SITE_VERSION="0.2.0")
    assert done.returncode == 0, done.stderr
    (tmp_path / "0.1.0").mkdir()
    (tmp_path / "0.1.0/index.html").write_text("the earlier version")
    site_pages.write_versions(tmp_path)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, browser() as open_tab:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        root = f"http://127.0.0.1:{server.server_port}"
        tab = open_tab(f"{root}/0.2.0/search.html?q=preemption")
        until(tab, "document.querySelectorAll('#mkdocs-search-results h3').length > 0")
        tab = open_tab(f"{root}/0.2.0/tasks/lora/")
        until(tab, "document.querySelectorAll('#versions option').length === 2")
        tab.select_option("#versions", "0.1.0")
        tab.wait_for_url("**/0.1.0/index.html")
        assert tab.inner_text("body") == "the earlier version"
        server.shutdown()


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
