"""Trainers for language models on JAX: exact resume, exact accumulation, fused losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ed_infra import lazy

_NAMES = {
    "ARGUMENTS": "ed_trainers.arguments",
    "DPOArguments": "ed_trainers.arguments",
    "SFTArguments": "ed_trainers.arguments",
    "TrainingArguments": "ed_trainers.arguments",
    "arguments_class": "ed_trainers.arguments",
    "Callback": "ed_trainers.callbacks",
    "LogWatcher": "ed_trainers.probes",
    "CheckpointManager": "ed_trainers.checkpoints.manager",
    "create_optimizer": "ed_trainers.state",
    "TrainingDiverged": "ed_trainers.running.stopping",
    "Loss": "ed_trainers.contract",
    "Method": "ed_trainers.contract",
    "MethodEntry": "ed_trainers.arguments",
    "MethodRun": "ed_trainers.contract",
    "Models": "ed_trainers.contract",
    "Rollout": "ed_trainers.rollout",
    "Sampled": "ed_trainers.rollout",
    "Weights": "ed_trainers.rollout",
    "SFTTrainer": "ed_trainers.methods.sft",
    "EasyDeLState": "ed_trainers.state",
    "Role": "ed_trainers.arguments",
    "Trainer": "ed_trainers.trainer",
    "TrainerOutput": "ed_trainers.trainer",
    "trainer_class": "ed_trainers.methods",
    "trainer_of": "ed_trainers.trainer",
}

__getattr__, __dir__, __all__ = lazy.attach(__name__, _NAMES)

if TYPE_CHECKING:
    from ed_trainers.arguments import ARGUMENTS as ARGUMENTS
    from ed_trainers.arguments import DPOArguments as DPOArguments
    from ed_trainers.arguments import MethodEntry as MethodEntry
    from ed_trainers.arguments import Role as Role
    from ed_trainers.arguments import SFTArguments as SFTArguments
    from ed_trainers.arguments import TrainingArguments as TrainingArguments
    from ed_trainers.arguments import arguments_class as arguments_class
    from ed_trainers.callbacks import Callback as Callback
    from ed_trainers.checkpoints.manager import CheckpointManager as CheckpointManager
    from ed_trainers.contract import Loss as Loss
    from ed_trainers.contract import Method as Method
    from ed_trainers.contract import MethodRun as MethodRun
    from ed_trainers.contract import Models as Models
    from ed_trainers.methods import trainer_class as trainer_class
    from ed_trainers.methods.sft import SFTTrainer as SFTTrainer
    from ed_trainers.probes import LogWatcher as LogWatcher
    from ed_trainers.rollout import Rollout as Rollout
    from ed_trainers.rollout import Sampled as Sampled
    from ed_trainers.rollout import Weights as Weights
    from ed_trainers.running.stopping import TrainingDiverged as TrainingDiverged
    from ed_trainers.state import EasyDeLState as EasyDeLState
    from ed_trainers.state import create_optimizer as create_optimizer
    from ed_trainers.trainer import Trainer as Trainer
    from ed_trainers.trainer import TrainerOutput as TrainerOutput
    from ed_trainers.trainer import trainer_of as trainer_of
