"""Pages of the site that are not in docs/, and links that leave docs/: hooks of mkdocs.

`tools/mkdocs.yml` states the command. The site has the README as its first page, CONTRIBUTING, and
a page for each package with the docstrings of its public names.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs"
#: Page of the site -> its file in the repository.
PAGES = {"index.md": "README.md", "contributing.md": ".github/CONTRIBUTING.md"}

_FENCE = re.compile(r"^( *```\w+) [^\n]+$", re.MULTILINE)
_CODE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^][]|\[[^][]*\])*)\]\((?!\w+:)([^)\s#]+)(#[^)\s]*)?\)")


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
