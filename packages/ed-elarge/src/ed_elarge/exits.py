"""Exit codes of the command line: errors of the input become a message, not a traceback."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from ed_data.errors import DataError
from ed_esurge.command.program import Result, finish, show_error
from ed_infra.errors import ConfigError, EasyDeLError
from ed_infra.logging import show_messages

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

#: Variable with the exit code of a training run that saved a checkpoint after SIGTERM; 0 without
#: it. A launcher whose cluster reads 0 for a finished run sets another code.
STOPPED_VARIABLE = "ELARGE_STOPPED_EXIT_CODE"

_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
_LESS_MEMORY = (
    "raise trainer.gradient_accumulation_steps, or set base_config: {values: "
    "{gradient_checkpointing: nothing_saveable}}, the section lora, or more devices in sharding; "
    "for a server lower esurge.hbm_utilization or max_num_batched_tokens. `elarge plan FILE` "
    "predicts the memory"
)


def stopped_exit_code() -> int:
    """Return the exit code of a training run that SIGTERM stopped.

    Raises:
        ConfigError: The variable is no exit code.
    """
    text = os.environ.get(STOPPED_VARIABLE, "0")
    if not text.isdecimal() or int(text) > 255:
        raise ConfigError(f"{STOPPED_VARIABLE}={text!r} must be a number from 0 to 255")
    return int(text)


def leave_other_processes() -> None:
    """End this process if it is one of several; call this function in the handler of a failure.

    At a normal end, jax waits up to five minutes for the other processes of the run, which wait for
    this one. The function prints the exception, and returns in a run of one process.
    """
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        return
    traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(FAILED)


def run_work(work: Callable[[], Result | int | None], *, verbose: bool = False) -> int:
    """Call a function, print its result for `--json`, and return its exit code.

    Invalid input prints one message and returns 2. A device without sufficient memory prints one
    message and returns 1. Other errors are defects or failures of the machine, and are raised.
    Warnings of this project are printed.
    """
    show_messages()
    try:
        return finish(work())
    except KeyboardInterrupt:
        show_error("interrupted", prefix="")
        return INTERRUPTED
    except (EasyDeLError, DataError) as error:
        if verbose:
            traceback.print_exc()
        show_error(str(error))
        return BAD_INPUT
    except RuntimeError as error:
        # The class of XLA's errors is not imported: jax is not needed before an action runs.
        first = str(error).partition("\n")[0]
        if type(error).__name__ != "JaxRuntimeError" or _OUT_OF_MEMORY not in first:
            raise
        if verbose:
            traceback.print_exc()
        show_error(f"a device is out of memory ({first[:200]}): {_LESS_MEMORY}")
        return FAILED
