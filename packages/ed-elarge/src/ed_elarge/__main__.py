"""`python -m ed_elarge` is the command `elarge`."""

from __future__ import annotations

from ed_elarge.command.main import app, main
from ed_elarge.command.runs import run_file

__all__ = ["app", "main", "run_file"]

if __name__ == "__main__":
    main()
