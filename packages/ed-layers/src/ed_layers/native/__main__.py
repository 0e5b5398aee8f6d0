"""`python -m ed_layers.native`: print the state of the library; `... build`: compile the
library."""

from __future__ import annotations

import argparse
import sys
import time

from ed_layers.native.build import CannotBuild, build
from ed_layers.native.library import describe


def _main() -> int:
    """Parse the command line; return 1 if the library cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m ed_layers.native", description=__doc__)
    parser.add_argument("action", nargs="?", choices=["build", "describe"], default="describe")
    if parser.parse_args().action == "build":
        began = time.perf_counter()
        try:
            path = build()
        except CannotBuild as error:
            print(f"native kernels: not built: {error}", file=sys.stderr)
            return 1
        size, seconds = path.stat().st_size / 1e3, time.perf_counter() - began
        print(f"built {path} ({size:.0f} kB) in {seconds:.1f} s")
    print(describe())
    return 0


if __name__ == "__main__":
    sys.exit(_main())
