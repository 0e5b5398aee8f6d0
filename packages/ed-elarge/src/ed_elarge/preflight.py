"""What can go wrong later is looked for now: before anything is trained.

`check` is cheap and comes first of all; `prepare` builds things, and comes before the first action
that needs them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ed_infra.errors import ConfigError

from ed_elarge import build, inference
from ed_elarge.action_options import Action
from ed_elarge.model import eLargeModel


def check(elm: eLargeModel, actions: Sequence[Action]) -> None:
    """Check what costs nothing: ports and folders.

    Raises:
        InputError: a port is taken, or a folder cannot be written.
    """
    run = elm.config
    for action in actions:
        with build.blame_at(run, action.path):
            if action.name == "serve":
                inference.check_port(action.options)
            elif action.name in ("to_json", "to_yaml"):
                writable(Path(action.options.path).parent)
            elif action.name == "eval":
                writable(elm.results_path(action.options).parent)
            elif action.name == "train":
                with build.blame(run, "trainer", "save_directory"):
                    writable(build.directory(run))


def prepare(elm: eLargeModel, actions: Sequence[Action]) -> None:
    """Build what training needs, and find the tasks of every evaluation.

    Raises:
        InputError: data or a model cannot be read, a mesh does not fit, a task does not exist, ….
    """
    run = elm.config
    if any(action.name == "train" for action in actions):
        elm.build_trainer()
    for action in actions:
        if action.name == "eval":
            with build.blame_at(run, action.path):
                elm.prepare_eval(action.options)


def writable(directory: Path) -> None:
    """Make sure that files can be written in a folder, making it if it is not there.

    Raises:
        ConfigError: it is a file, or may not be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {directory}: {error.strerror}") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"the folder {directory} may not be written by this user")
