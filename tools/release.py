"""Check a release tag: `ed-layers-v0.2.0` must name a package, its version and a CHANGELOG entry.

    uv run python -m tools.release ed-layers-v0.2.0            prints package and version
    uv run python -m tools.release ed-layers-v0.2.0 --notes    prints the CHANGELOG entry

With `GITHUB_OUTPUT` set, `package=…` and `version=…` are appended to that file for later jobs.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from tools.check_workspace import changelog_entry, problems
from tools.workspace import Package, packages

TAG = re.compile(r"^(?P<name>ed-[a-z]+)-v(?P<version>\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)$")


class TagError(ValueError):
    """A tag that must not be released."""


def package_of(tag: str) -> Package:
    """Return the package that a tag releases.

    Raises:
        TagError: The tag is malformed, names no package, or differs from the version in the tree.
    """
    match = TAG.match(tag)
    if match is None:
        raise TagError(f"{tag!r} is not a release tag: write ed-<name>-v<major>.<minor>.<patch>")
    members = {package.name: package for package in packages()}
    package = members.get(match["name"])
    if package is None:
        raise TagError(f"{tag!r} names no package; the packages are {', '.join(members)}")
    if match["version"] != package.version:
        raise TagError(
            f"{tag!r} does not match {package.name} {package.version}: "
            f"tag that version, or set the version first (uv version --package {package.name})"
        )
    if not changelog_entry(package):
        raise TagError(f"{package.name} has no CHANGELOG entry for {package.version}")
    return package


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.release",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tag", help="for example ed-layers-v0.2.0")
    parser.add_argument("--notes", action="store_true", help="print the CHANGELOG entry")
    options = parser.parse_args()
    try:
        package = package_of(options.tag)
    except TagError as error:
        sys.exit(f"release: {error}")
    if options.notes:
        print(changelog_entry(package))
        return
    if faults := problems():
        sys.exit("release: the workspace is inconsistent:\n" + "\n".join(faults))
    facts = f"package={package.name}\nversion={package.version}\n"
    if output := os.environ.get("GITHUB_OUTPUT"):
        with Path(output).open("a", encoding="utf-8") as file:
            file.write(facts)
    print(facts, end="")


if __name__ == "__main__":
    main()
