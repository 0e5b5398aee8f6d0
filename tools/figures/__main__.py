"""Print figures of the source code: files, lines, types, names, and files that a task executes.

uv run python -m tools.figures                  a table with a row for each package, and two rates
uv run python -m tools.figures --names          also names with several meanings, and unclear names
uv run python -m tools.figures --walk chat row  the files that a request or a row executes
"""

from __future__ import annotations

import argparse

from tools.bench.measure import table
from tools.figures.names import count_names
from tools.figures.sources import (
    FAMILY,
    HEADER,
    Source,
    imported_by,
    list_repeated_names,
    list_server_declarations,
    row,
    several_meanings,
    texts,
)
from tools.figures.walks import WALKS, trace_walk
from tools.workspace import packages


def main() -> None:
    """Print the table and the names, or the files of walks."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--names", action="store_true", help="list the names")
    parser.add_argument("--walk", nargs="+", choices=sorted(WALKS), help="trace these walks")
    parser.add_argument("--files", action="store_true", help="list the files of the walks")
    options = parser.parse_args()
    if options.walk:
        for name in options.walk:
            print_walk(name, options.files)
    else:
        print_sources(options.names)


def print_sources(lists_names: bool) -> None:
    """Print a table of the packages, and what their names are like."""
    by_package = {package: texts(package.folder / "src") for package in packages()}
    imported = imported_by(FAMILY)
    rows, everything = [], []
    for package, modules in by_package.items():
        sources = [Source.of(text) for text in modules.values()]
        everything += sources
        rows.append(row(package.name, sources, sum(imported[name] for name in package.modules)))
    rows.append(row("all", everything, sum(int(cells[-1]) for cells in rows)))
    print(table(HEADER, rows))
    print(
        f"\nThe last column is the number of modules that `import {FAMILY}` loads,\n"
        "without `__init__.py` files."
    )
    modules = {name: text for files in by_package.values() for name, text in files.items()}
    repeated = several_meanings({m: t for m, t in modules.items() if m.startswith("ed_")})
    print(f"{len(repeated)} public names have definitions that differ between modules.")
    shared_names = list_repeated_names(modules)
    print(f"{len(shared_names)} public names are defined in several modules.")
    options = list_server_declarations(modules)
    print(f"{max(map(len, options.values()))} places at most declare an option of the server.")
    names = count_names(modules.values())
    print(f"{names.function_rate:.1f} of 1,000 functions are no verbs.")
    print(f"{names.variable_rate:.1f} of 1,000 variables are no nouns.")
    if lists_names:
        for name, places in {**repeated, **shared_names}.items():
            print(f"  {name}: {', '.join(places)}")
        for counts in (names.unclear_functions, names.unclear_variables):
            print("  " + ", ".join(f"{name} {count}" for name, count in counts.most_common()))


def print_walk(name: str, lists_files: bool) -> None:
    """Print the number of files and functions that a walk executes."""
    files = trace_walk(name)
    functions = sum(map(len, files.values()))
    print(f"{name}: {len(files)} files, {functions} functions. {WALKS[name].__doc__}")
    for file, names in files.items() if lists_files else ():
        print(f"  {file}: {', '.join(names)}")


if __name__ == "__main__":
    main()
