"""Check that the seven packages are compatible when they are installed from wheels.

Inside a workspace uv ignores the version bounds between members (ed-infra 0.2 satisfies
`ed-infra<0.2`), so a wrong bound would first fail on a user's machine.

Run `uv run python -m tools.check_workspace`. It prints one line for each fault and exits with 1 if
there is one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.workspace import ROOT, Package, packages, read_toml

TOP_LEVEL = {
    *("packages", "tools", "tests", "docs", "examples", "docker", ".github", ".ci"),
    *(
        "pyproject.toml",
        "uv.lock",
        "AGENTS.md",
        "README.md",
        "SECURITY.md",
        "LICENSE",
        "conftest.py",
    ),
    *(".dockerignore", ".gitignore", ".pre-commit-config.yaml"),
}
NEVER_LOCKED = re.compile(r"^(torch|tensorflow|triton|nvidia-.*|jax-cuda.*|libtpu)$")

Check = Callable[[Path, list[Package]], Iterator[str]]


def sibling_bounds(root: Path, members: list[Package]) -> Iterator[str]:
    """Check that the bounds of sibling packages are ranges that contain the current version."""
    versions = {package.name: package.version for package in members}
    for package in members:
        for need in package.all_requirements:
            if need.name not in versions:
                continue
            operators = {bound.operator for bound in need.specifier}
            if operators != {">=", "<"}:
                yield (
                    f"{package.name}: {need} must have a floor and a ceiling, "
                    f"as {need.name}>=0.1,<0.2 (== would force all releases together)"
                )
            if not need.specifier.contains(versions[need.name], prereleases=True):
                yield (
                    f"{package.name}: {need} excludes {need.name} {versions[need.name]}, "
                    f"the version in this tree: move the bound, and release {package.name} too"
                )


def sources(root: Path, members: list[Package]) -> Iterator[str]:
    """Check that the workspace contains all packages, and uses them as sources."""
    names = {package.name for package in members}
    workspace = read_toml(root / "pyproject.toml")
    for name in sorted(names - set(workspace["project"]["dependencies"])):
        yield f"pyproject.toml: {name} is not among the workspace's dependencies"
    tables = [("pyproject.toml", names, workspace)]
    for package in members:
        needed = {need.name for need in package.all_requirements} & names
        tables.append((package.name, needed, package.pyproject))
    for where, needed, table in tables:
        given = table.get("tool", {}).get("uv", {}).get("sources", {})
        for name in sorted(needed):
            if given.get(name) != {"workspace": True}:
                yield f"{where}: [tool.uv.sources] must contain {name} = {{ workspace = true }}"
        for name in sorted(set(given) - needed):
            yield f"{where}: [tool.uv.sources] names {name}, which is not needed here"


def changelogs(root: Path, members: list[Package]) -> Iterator[str]:
    """Check that the changelog of each package has an entry for its version."""
    for package in members:
        if not changelog_entry(package):
            yield (
                f"{package.folder.name}/CHANGELOG.md: no entry for {package.version}; "
                f"add '## {package.version}' and what changed"
            )


def changelog_entry(package: Package) -> str:
    """Return the changelog entry of the package's version, or an empty string."""
    text = (package.folder / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = re.compile(rf"^## \[?{re.escape(package.version)}\]?.*$", re.MULTILINE)
    found = heading.search(text)
    return re.split(r"^## ", text[found.end() :], flags=re.MULTILINE)[0].strip() if found else ""


def same_everywhere(root: Path, members: list[Package]) -> Iterator[str]:
    """Check that all packages have the same Python version and the same third-party bounds."""
    pythons = {package.name: package.project["requires-python"] for package in members}
    pythons["the workspace"] = read_toml(root / "pyproject.toml")["project"]["requires-python"]
    if len(set(pythons.values())) > 1:
        yield f"requires-python differs: {pythons}"
    bounds: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for package in members:
        for need in package.all_requirements:
            bounds[need.name][str(need.specifier)].append(package.name)
    for name, by_bound in sorted(bounds.items()):
        if len(by_bound) > 1:
            yield f"{name} is bounded in more than one way: {dict(by_bound)}"
        if "" in by_bound:
            yield f"{name} has no lower bound in {', '.join(by_bound[''])}"


def files(root: Path, members: list[Package]) -> Iterator[str]:
    """Check that each package has a license, a README, a changelog, tests and types."""
    license_text = (root / "LICENSE").read_bytes()
    for package in members:
        wanted = ["README.md", "CHANGELOG.md", "LICENSE"]
        wanted += [f"src/{module}/py.typed" for module in package.modules]
        for file in wanted:
            if not (package.folder / file).is_file():
                yield f"{package.folder.name}/{file} is missing"
        if not list((package.folder / "tests").glob("test_*.py")):
            yield f"{package.folder.name}/tests contains no test_*.py"
        own = package.folder / "LICENSE"
        if own.is_file() and own.read_bytes() != license_text:
            yield f"{package.folder.name}/LICENSE differs from the one at the root"


def lock(root: Path, members: list[Package]) -> Iterator[str]:
    """Check that uv.lock has one index, current versions, and no wheels for accelerators."""
    locked = read_toml(root / "uv.lock")["package"]
    indexes = {entry["source"]["registry"] for entry in locked if "registry" in entry["source"]}
    if len(indexes) != 1:
        yield f"uv.lock names the indexes {sorted(indexes)}: create the file with plain `uv lock`"
    by_name = {entry["name"]: entry for entry in locked}
    for package in members:
        entry = by_name.get(package.name, {})
        if (version := entry.get("version")) != package.version:
            yield f"uv.lock has {package.name} {version}, not {package.version}: run `uv lock`"
    for name in sorted(filter(NEVER_LOCKED.match, by_name)):
        yield f"uv.lock contains {name}: accelerator packages and torch are never locked"
    for entry in locked:
        if not {"registry", "editable", "virtual"} & set(entry["source"]):
            yield f"uv.lock has {entry['name']} from {entry['source']}: only the index is allowed"


def top_level(root: Path, members: list[Package]) -> Iterator[str]:
    """Check that the root contains no unexpected files."""
    listing = ["git", "ls-files", "--cached"]
    tracked = subprocess.run(listing, cwd=root, capture_output=True, text=True, check=False)
    names = {path.split("/")[0] for path in tracked.stdout.splitlines()}
    for name in sorted(names - TOP_LEVEL):
        yield f"{name} is tracked at the top level: it belongs under one of {sorted(TOP_LEVEL)}"


#: Files that are equal in two packages, because ed-data imports no other package.
COPIES = {
    "ed-data/src/ed_data/conversation.py": "ed-infra/src/ed_infra/conversation.py",
    "ed-data/src/ed_data/public_addresses.py": (
        "ed-esurge/src/ed_esurge/server/http/public_addresses.py"
    ),
}


def copies(root: Path, members: list[Package]) -> Iterator[str]:
    """Check that the files of `COPIES` have equal content."""
    for copy, original in COPIES.items():
        paths = [root / "packages" / name for name in (copy, original)]
        if all(path.is_file() for path in paths) and len({p.read_bytes() for p in paths}) > 1:
            yield f"packages/{copy} differs from packages/{original}: copy the original"


CHECKS: list[Check] = [
    copies,
    sibling_bounds,
    sources,
    changelogs,
    same_everywhere,
    files,
    lock,
    top_level,
]


def problems(root: Path = ROOT) -> list[str]:
    """Return every fault of the workspace at `root`, one line each."""
    members = packages(root)
    return [line for check in CHECKS for line in check(root, members)]


if __name__ == "__main__":
    found = problems()
    print("\n".join(found) or f"the {len(packages())} packages are compatible")
    sys.exit(bool(found))
