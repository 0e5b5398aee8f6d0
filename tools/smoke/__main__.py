"""Build every wheel, install the wheels into fresh environments, and check imports and serving.

uv run python -m tools.smoke                                  all packages, newest versions
uv run python -m tools.smoke --package ed-infra --resolution lowest-direct
uv run python -m tools.smoke --python 3.13 --tests            their own tests, from the wheels
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tools.smoke import checks
from tools.smoke.environment import NATIVE, SmokeError, build_wheels
from tools.workspace import packages

THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    names = [package.name for package in packages()]
    parser = argparse.ArgumentParser(
        prog="python -m tools.smoke",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--package", action="append", choices=names, help="only this package; may be repeated"
    )
    parser.add_argument(
        "--resolution",
        choices=["highest", "lowest-direct"],
        default="highest",
        help="newest versions, or the floors that each package declares",
    )
    parser.add_argument(
        "--python", default=THIS_PYTHON, help="Python version (default: %(default)s)"
    )
    parser.add_argument("--dist", type=Path, help="use the wheels of this folder; build none")
    parser.add_argument(
        "--tests", action="store_true", help="also run each package's tests with its wheel"
    )
    parser.add_argument("--no-imports", action="store_true", help="skip the import of every module")
    parser.add_argument("--no-serve", action="store_true", help="skip the environment for serving")
    return parser.parse_args()


def main() -> None:
    """Run the chosen checks, and stop at the first failure."""
    options = arguments()
    chosen = [p for p in packages() if not options.package or p.name in options.package]
    with tempfile.TemporaryDirectory(prefix="smoke-") as scratch_name:
        scratch = Path(scratch_name)
        dist = options.dist.resolve() if options.dist else scratch / "dist"
        plan = checks.Plan(scratch, dist, options.python, options.resolution)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(scratch / "jax"))
        if not options.dist:
            build_wheels(dist)
        if not options.no_imports:
            for package in chosen:
                checks.imports(package, plan)
        if not options.package or NATIVE in options.package:
            checks.both_kinds(plan)
        if not options.no_serve and not options.package:
            checks.serves(plan)
        if options.tests:
            for package in chosen:
                checks.own_tests(package, plan)


if __name__ == "__main__":
    try:
        main()
    except SmokeError as error:
        print(f"\nsmoke: {error}", file=sys.stderr)
        sys.exit(1)
