"""Exit codes of the command line: errors of the input become a message, not a traceback."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from ed_data.errors import DataError
from ed_infra.errors import EasyDeLError

BAD_INPUT, INTERRUPTED = 2, 130


def guarded(work: Callable[[], int | None], *, verbose: bool = False) -> int:
    """Call a function and return its exit code; None is success.

    Invalid input prints one message and returns 2. Other errors are defects or failures of the
    machine, and are raised.
    """
    try:
        return work() or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (EasyDeLError, DataError) as error:
        if verbose:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
