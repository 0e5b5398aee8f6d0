"""Run the conformance suite and store the largest error of each check in docs/conformance.json.

    uv run python -m tests.conformance.results                  every registered family
    uv run python -m tests.conformance.results llama gpt2       these families
    uv run python -m tests.conformance.results --missing        families with incomplete results
    uv run python -m tests.conformance.results --checks parity cache

The file is written after each row. An interrupted run continues with `--missing`, and several runs
may process different families. `tools.model_table` creates the table of docs/models.md from the
file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tools.workspace import ROOT

if TYPE_CHECKING:
    from ed_models.conformance import Check, Subject

PATH = ROOT / "docs/conformance.json"
CACHE = ROOT / ".cache/jax"
#: Checks that a bug in `transformers` makes impossible: (model type, row, check) -> bug.
IMPOSSIBLE = {
    ("longcat_flash", "experts that do nothing", "saved"): (
        "transformers 5.23 creates matrices for experts without computation, and so rejects "
        "checkpoints in Meituan's layout, which has none"
    ),
    ("rwkv", "wider time mixing, tied", "generation"): (
        "transformers 5.23 creates states of the hidden size and ignores attention_hidden_size"
    ),
}
#: Model type -> row of its `Cases` -> check -> largest error, or why the check failed.
Results = dict[str, dict[str, dict[str, float | str]]]


def checks() -> Mapping[str, Check]:
    """Return all checks: those of the models, and that of the engine."""
    from ed_esurge.conformance import compare_engine
    from ed_models.conformance import CHECKS

    return {**CHECKS, "engine": compare_engine}


def read() -> Results:
    """Return the stored results."""
    return json.loads(PATH.read_text(encoding="utf-8")) if PATH.is_file() else {}


def write(results: Results) -> None:
    """Store the results, sorted by family."""
    families = []
    for family, rows in sorted(results.items()):
        lines = [f"  {_json(row)}: {_json(of)}" for row, of in sorted(rows.items())]
        families.append(f" {_json(family)}: {{\n" + ",\n".join(lines) + "\n }")
    partial = PATH.with_name(f"{PATH.name}.{os.getpid()}")
    partial.write_text("{\n" + ",\n".join(families) + "\n}\n", encoding="utf-8")
    partial.replace(PATH)


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def is_complete(results: Results, subject: Subject) -> bool:
    """Return whether every applicable check of a row has a number."""
    row = results.get(subject.model_type, {}).get(subject.row, {})
    return all(isinstance(row.get(check), float) for check in applicable(subject))


def applicable(subject: Subject) -> list[str]:
    """Return the names of the checks that apply to a row."""
    from ed_infra.enums import TaskType
    from ed_models.conformance import AGAINST_TORCH

    left_out = checks().keys() - {*subject.checks, "engine"}
    left_out |= set() if subject.task == TaskType.CAUSAL_LM else {"engine"}
    left_out |= set() if subject.is_in_transformers else set(AGAINST_TORCH)
    left_out |= {n for n in checks() if (subject.model_type, subject.row, n) in IMPOSSIBLE}
    return [name for name in checks() if name not in left_out]


def run(subject: Subject, names: list[str]) -> dict[str, float | str]:
    """Run checks on one row, and return errors with two digits, or the first line of a failure."""
    table = checks()
    found: dict[str, float | str] = {}
    for name in names:
        began = time.perf_counter()
        try:
            found[name] = float(f"{table[name](subject):.1e}")
        except Exception as error:  # a failure is also a result
            found[name] = (str(error).strip() or type(error).__name__).splitlines()[0]
        print(f"{subject}: {name}: {found[name]} ({time.perf_counter() - began:.1f} s)", flush=True)
    return found


def main() -> int:
    """Parse the command line, run the checks, store the results; return 1 if a check failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance.results",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("families", nargs="*", help="model types; default: all")
    parser.add_argument("--checks", nargs="+", help="only these checks")
    parser.add_argument("--missing", action="store_true", help="only rows that are incomplete")
    given = parser.parse_args()
    _simulate_devices()

    import jax

    from tests.conformance.cases import subjects

    failed = 0
    rows = subjects(*given.families)
    unknown = set(given.checks or ()) - set(checks())
    if unknown:
        parser.error(f"unknown checks {sorted(unknown)} (known: {', '.join(checks())})")
    if not given.families:  # remove rows that no longer exist
        there = {(s.model_type, s.row) for s in rows}
        kept = {
            family: {row: value for row, value in of.items() if (family, row) in there}
            for family, of in read().items()
        }
        write({family: of for family, of in kept.items() if of})
    for subject in rows:
        if given.missing and is_complete(read(), subject):
            continue
        names = [n for n in applicable(subject) if n in (given.checks or applicable(subject))]
        found = run(subject, names)
        failed += sum(isinstance(value, str) for value in found.values())
        results = read()  # another run may have changed the file
        of_row = results.setdefault(subject.model_type, {}).setdefault(subject.row, {})
        of_row |= found
        write(results)
        jax.clear_caches()
    return 1 if failed else 0


def _simulate_devices() -> None:
    """Set up eight simulated devices and the compilation cache of the tests."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


if __name__ == "__main__":
    sys.exit(main())
