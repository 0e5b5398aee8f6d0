"""What training and evaluation will need is built before the first of them begins."""

from __future__ import annotations

from collections.abc import Sequence

from ed_elarge import build
from ed_elarge.action_options import Action
from ed_elarge.model import eLargeModel


def prepare(elm: eLargeModel, actions: Sequence[Action]) -> None:
    """Build what training needs, and find the tasks of every evaluation.

    Raises:
        InputError: data or a model cannot be read, a mesh does not fit, a task does not exist, ….
    """
    if any(action.name == "train" for action in actions):
        elm.build_trainer()
    for action in actions:
        if action.name == "eval":
            with build.blame_at(elm.config, action.path):
                elm.prepare_eval(action.options)
