"""Fields of the rows that the trainer reads: the sources of a run need not name them.

A reward function receives the fields of its parameters, as in TRL. `additional_fields` of a source
names further fields, for functions that read them if they exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ed_trainers.options.distillation import SDFTArguments
from ed_trainers.options.groups import SDPOArguments
from ed_trainers.options.online import RewardedArguments

if TYPE_CHECKING:
    from ed_data.config.mixture import Mixture
    from ed_data.config.source import Inform
    from ed_trainers.arguments import TrainingArguments
    from ed_trainers.rewards import RewardFunction

    from ed_elarge.config.run_config import RunConfig

#: Field of the rows that `sdft` and `include_environment_feedback` of `sdpo` show to the teacher.
_FEEDBACK = "privileged_context"


def list_read_fields(
    trainer: TrainingArguments, functions: Sequence[RewardFunction], folder: Path
) -> Iterator[str]:
    """Yield the fields of the rows without which the trainer stops.

    Args:
        trainer: Options of the method.
        functions: Functions that replace `reward_functions`; empty for those of the options.
        folder: The folder of the run file, in which modules are searched first.

    Raises:
        ConfigError: A function does not exist.
    """
    shows_feedback = isinstance(trainer, SDPOArguments) and trainer.include_environment_feedback
    if shows_feedback or isinstance(trainer, SDFTArguments):
        yield _FEEDBACK
    if not isinstance(trainer, RewardedArguments):
        return
    from ed_trainers.rewards import list_fields  # read by methods with rewards only

    for entry in functions or trainer.reward_functions:
        yield from list_fields(entry, (folder,))


def add_read_fields(
    run: RunConfig, mixture: Mixture, functions: Sequence[RewardFunction] = ()
) -> Mixture:
    """Return the mixture of a run, whose sources also keep the fields that the trainer reads.

    Args:
        run: The run.
        mixture: Its mixture.
        functions: Functions that replace `reward_functions` of the trainer.
    """
    if run.trainer is None or not run.takes_prompts:
        return mixture
    with run.blame("trainer", "reward_functions"):
        fields = tuple(dict.fromkeys(list_read_fields(run.trainer, functions, run.folder)))
    if not fields:
        return mixture

    def add(inform: Inform) -> Inform:
        missing = [name for name in fields if name not in inform.additional_fields]
        if not missing:
            return inform
        return inform.replace(additional_fields=(*inform.additional_fields, *missing))

    return mixture.replace(
        informs=[add(inform) for inform in mixture.informs],
        eval_informs=[add(inform) for inform in mixture.eval_informs],
    )
