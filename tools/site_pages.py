"""Pages of the site that are not in docs/, and links that leave docs/: hooks of mkdocs.

`tools/mkdocs.yml` states the command. The site has the README as its first page, CONTRIBUTING, and
a page for each package with the docstrings of its public names. Versions of the site are folders
next to each other.
"""

from __future__ import annotations

import ast
import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs"
#: Page of the site -> its file in the repository.
PAGES = {"index.md": "README.md", "contributing.md": ".github/CONTRIBUTING.md"}

_VERSION = re.compile(r"[\w][\w.+-]*")
_FENCE = re.compile(r"^( *```\w+) [^\n]+$", re.MULTILINE)
_CODE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^][]|\[[^][]*\])*)\]\((?!\w+:)([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Write the site of a version, the variable `SITE_VERSION`, to a folder of its name."""
    version = os.environ.get("SITE_VERSION")
    if version:
        if not _VERSION.fullmatch(version):
            raise PluginError(f"SITE_VERSION={version} must be a word, such as 0.2.0 or main")
        config.extra["site_version"] = version
        config.site_dir = str(Path(config.site_dir) / version)
    return config


def on_post_build(config: Any) -> None:
    """Write the list of the versions, and the first page, which leads to the newest one."""
    if "site_version" in config.extra:
        write_versions(Path(config.site_dir).parent)


def write_versions(folder: Path) -> None:
    """Write `versions.json` and `index.html` for the versions that are folders of `folder`.

    The newest release comes first, and words such as `main` come last.
    """
    names = [page.parent.name for page in folder.glob("*/index.html")]
    names.sort(key=lambda name: ([int(n) for n in re.findall(r"\d+", name)], name), reverse=True)
    (folder / "versions.json").write_text(json.dumps(names) + "\n", "utf-8")
    page = f'<!doctype html><meta http-equiv="refresh" content="0; url={names[0]}/index.html">\n'
    (folder / "index.html").write_text(page, "utf-8")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    for page, source in PAGES.items():
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, page, content=text))
    for folder in sorted(ROOT.glob("packages/ed-*")):
        package = folder.name.replace("-", "_")
        files.append(File.generated(config, f"api/{package}.md", content=api_page(package)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return the text of a page with links for the site, and without the marks of tested blocks."""
    return for_site(markdown, page.file.src_uri, config.repo_url)


def for_site(text: str, page: str, repository: str | None) -> str:
    """Return a page with links that are right in the site.

    A link to a file outside of the site is a link to the repository, or only its label without a
    `repo_url` in tools/mkdocs.yml. A link to a missing file stays, so that mkdocs reports the link.

    Args:
        text: The page.
        page: Its path in the site.
        repository: Address of the repository.
    """
    home = posixpath.dirname(PAGES.get(page, f"{DOCS}/{page}"))
    in_site = {source: name for name, source in PAGES.items()}

    def link(found: re.Match[str]) -> str:
        image, label, path, anchor = found.groups(default="")
        target = posixpath.normpath(posixpath.join(home, path))
        name = in_site.get(target, target.removeprefix(f"{DOCS}/"))
        if name != target:
            return f"{image}[{label}]({posixpath.relpath(name, posixpath.dirname(page))}{anchor})"
        if not (ROOT / target).exists():
            return found[0]
        return f"[{label}]({repository}/blob/main/{target})" if repository else label

    parts, start = [], 0
    for code in _CODE.finditer(text):
        parts += [_LINK.sub(link, text[start : code.start()]), _FENCE.sub(r"\1", code[0])]
        start = code.end()
    return "".join([*parts, _LINK.sub(link, text[start:])])


def api_page(package: str) -> str:
    """Return the page of a package: its docstring, and each public name."""
    file = ROOT / "packages" / package.replace("_", "-") / "src" / package / "__init__.py"
    tree = ast.parse(file.read_text("utf-8"))
    lines = [f"# `{package}`", "", ast.get_docstring(tree) or "", ""]
    for name, module in sorted(public_names(tree).items(), key=lambda item: item[0].lower()):
        lines += [f"::: {module}.{name}", ""]
    return "\n".join(lines)


def public_names(tree: ast.Module) -> dict[str, str]:
    """Return the public names of a package and their modules: its imports for type checkers."""
    return {
        (alias.asname or alias.name): node.module
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
