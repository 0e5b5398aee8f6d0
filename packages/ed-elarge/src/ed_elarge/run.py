"""Run the actions of a checked file, one after the other."""

from __future__ import annotations

import logging
import os
import sys

from ed_elarge import actions, compile_cache, preflight, surroundings
from ed_elarge.build import blame_at
from ed_elarge.model import eLargeModel
from ed_elarge.normalize import Run

#: Exit codes of a run that a signal ended; as of the shell.
_BY_SIGNAL = {"SIGINT": 130, "SIGTERM": 143}
_HEAVY = frozenset({"train", "eval", "generate", "serve"})


def execute(run: Run, *, verbose: bool = False) -> int:
    """Do what the file says; returns the exit code.

    Raises:
        InputError: something is wrong with the input; nothing was begun, or what was trained until
            then is kept, and standard error says where.
    """
    if not sys.stderr.isatty():
        # tqdm reads it when it is imported; lm-eval and datasets draw bars whatever they write to
        os.environ.setdefault("TQDM_DISABLE", "1")
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s")
    session = actions.Session(eLargeModel.from_run(run))
    surroundings.check(run)
    prepared = False
    for action in run.actions:
        if action.name in _HEAVY and not prepared:
            from ed_infra import distributed

            compile_cache.enable()
            distributed.initialize()
            preflight.prepare(session.elm, run.actions)
            prepared = True
        try:
            with blame_at(run, action.path):
                actions.perform(session, action)
        except BaseException:
            session.summary.say_what_is_kept()
            raise
        if session.stopped is not None:
            skipped = run.actions[run.actions.index(action) + 1 :]
            if skipped:
                names = ", ".join(a.name for a in skipped)
                print(f"not done: {names}", file=sys.stderr)
            return _BY_SIGNAL.get(session.stopped, 0)
    session.summary.show()
    return 0
