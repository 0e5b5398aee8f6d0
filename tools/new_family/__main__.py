"""Draft a family of ed-models from the model of `transformers`.

    uv run python -m tools.new_family arcee                         write the family
    uv run python -m tools.new_family arcee --print                 print its source
    uv run python -m tools.new_family arcee --package ../my-models  write it to a separate package

The tool follows the parents of the type in the modular files of `transformers`, runs a small model
of the type on torch, expresses the differences in the vocabulary of this project, and compares
logits. It writes the family, its tiny configurations and its entry point only if the logits agree,
runs the conformance suite in a child process, and reports what remains.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line; 0 = the family passes its suite, 1 = it does not, 2 = wrong name."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.new_family",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("types", nargs="+", help="model types of transformers")
    parser.add_argument("--print", action="store_true", dest="prints", help="write no files")
    parser.add_argument("--package", type=Path, help="folder of a separate package")
    parser.add_argument("--no-suite", action="store_true", help="do not run the suite")
    given = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    from ed_infra import registry

    from tools.new_family import build, write
    from tools.new_family.trace import NotTraced

    status = 0
    known = set(registry.model_types())
    for model_type in given.types:
        if model_type in known and not given.prints:
            print(f"the family {model_type!r} exists already", file=sys.stderr)
            return 2
        try:
            result = build.draft_family(model_type, known)
        except NotTraced as error:
            print(error, file=sys.stderr)
            return 2
        print("\n".join(write.report(model_type, result)), flush=True)
        if result.draft is None:
            status = 1
            continue
        if given.prints:
            print(result.draft.source)
            continue
        began = time.perf_counter()
        paths = write.write_family(result.draft, result.rows, given.package)
        print("\n".join(f"wrote {path}" for path in paths))
        if given.package is None and not given.no_suite:
            status |= write.run_suite(result.draft)
            print(f"suite: {time.perf_counter() - began:.0f} s")
        print(write.list_steps(model_type, given.package))
    return status


if __name__ == "__main__":
    sys.exit(main())
