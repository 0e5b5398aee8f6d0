"""`python -m ed_trainers.report DIRECTORY`."""

from __future__ import annotations

import argparse
import sys

from ed_infra.errors import EasyDeLError

from ed_trainers.report import write_report


def _main() -> int:
    """Write the report of a run and print its path."""
    parser = argparse.ArgumentParser(prog="python -m ed_trainers.report", description=__doc__)
    parser.add_argument("directory", help="save_directory of the run")
    try:
        print(write_report(parser.parse_args().directory))
    except EasyDeLError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
