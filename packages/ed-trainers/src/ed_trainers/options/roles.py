"""Roles: the frozen models that a method can read. Free of jax.

A role has one entry in `ROLES`. Its name is the key of `frozen=` of a trainer and of `models[...]`
in a loss, and with the suffix `_model` the section of a run file. The learner, the policy, has no
entry. Further trained variables, such as a value head, are an `Extension` of a method.
"""

from __future__ import annotations

from typing import NamedTuple

from ed_infra.enums import TaskType


class Role(NamedTuple):
    """A frozen model that a method reads.

    Attributes:
        name: the name of the role.
        required: whether the method needs the model.
        task: the task of the model.
    """

    name: str
    required: bool = False
    task: TaskType = TaskType.CAUSAL_LM

    @property
    def section(self) -> str:
        """The section of a run file that names the model."""
        return f"{self.name}_model"


REFERENCE = Role("reference")
TEACHER = Role("teacher", required=True)
REWARD = Role("reward", task=TaskType.SEQUENCE_CLASSIFICATION)

#: Roles by name; each one is a section of run files.
ROLES = {role.name: role for role in (REFERENCE, TEACHER, REWARD)}
