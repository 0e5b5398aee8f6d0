"""EasyDeL's objects for training: `LossConfig` and `RayDistributedTrainer`.

Each one calls the function of this project that does the same; nothing else imports this module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, cast

import numpy as np
from ed_infra import registry
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.config.subclass import known_names
from ed_infra.enums import TaskType, canonical_task
from ed_infra.errors import ConfigError
from ed_layers.losses import TokenLoss
from ed_models.base.module import EasyDeLBaseModule
from ed_trainers.arguments import TrainingArguments
from ed_trainers.given import GivenRow
from ed_trainers.methods.sft import SFTTrainer
from ed_trainers.state import EasyDeLState
from ed_trainers.trainer import Trainer, TrainerOutput
from jax.typing import DTypeLike
from transformers import AutoTokenizer, PreTrainedTokenizerBase

#: Field of EasyDeL's `LossConfig` -> the values that every loss here has.
_LOSS_VALUES: dict[str, tuple[tuple[object, ...], str]] = {
    "ignore_index": ((-100,), "labels of -100 are ignored"),
    "loss_normalizing_factor": (
        (None, "NUM_REAL_TARGET_TOKENS"),
        "a loss is the mean over the tokens with a target",
    ),
    "divide_weight_sum": ((False,), "a loss is the mean over the tokens with a target"),
    "shift_tokens": ((True,), "models of masked tokens do not shift labels, and decoders do"),
    "reduction": ((None, "mean"), "a loss is a mean"),
    "compute_dtype": ((None, "fp32"), "losses are computed in float32"),
    "num_labels": ((None,), "set num_labels of the configuration of the model"),
    "num_classification_labels": ((None,), "set num_labels of the configuration of the model"),
    "problem_type": ((None,), "set problem_type of the configuration of the model"),
    "classification_problem_type": ((None,), "set problem_type of the configuration of the model"),
}
#: Fields that change neither the value nor the gradient of a loss here.
_CHUNKS = ("chunk_vocab_size", "chunk_token_size", "chunk_block_size", "break_on_nan")


class LossConfig:
    """EasyDeL's name of `TokenLoss`."""

    def __new__(
        cls, *, label_smoothing: float = 0.0, z_loss: float = 0.0, **fields: object
    ) -> TokenLoss:
        """Return a `TokenLoss` from the fields of EasyDeL's `LossConfig`.

        Args:
            label_smoothing, z_loss: see `TokenLoss`.
            fields: the other fields of EasyDeL. `chunk_*` and `break_on_nan` have no effect:
                losses choose the number of tokens whose logits exist at the same time, and trainers
                stop at NaN. The others must have the value that every loss here has.

        Raises:
            ConfigError: a field is unknown, or has another value.
        """
        for name, value in fields.items():
            if name in _CHUNKS:
                continue
            if name not in _LOSS_VALUES:
                listing = ", ".join(["label_smoothing", "z_loss", *_LOSS_VALUES, *_CHUNKS])
                raise ConfigError(f"LossConfig has no field {name!r} (known: {listing})")
            values, reason = _LOSS_VALUES[name]
            plain = getattr(value, "name", value)
            if not any(plain is one or plain == one for one in values):
                raise ConfigError(f"{name}={value!r} is not supported: {reason}")
        return TokenLoss(label_smoothing=label_smoothing, z_loss=z_loss)


#: Sizes that `scaling_index` multiplies, and the other fields of a new model, as in EasyDeL.
SCALED_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MODEL_VALUES: dict[str, object] = {
    "dtype": "bfloat16",
    "param_dtype": "bfloat16",
    "precision": None,
    "seed": 654,
    "max_position_embeddings": 8192,
    "gradient_checkpointing": "",
    "initializer_range": 0.02,
    "attn_mechanism": "auto",
    "attn_dtype": "bfloat16",
    "attn_softmax_dtype": "bfloat16",
    "sharding_axis_names": ("dp", "fsdp", "ep", "tp", "sp"),
    "sharding_axis_dims": (1, -1, 1, 1, 1),
}
#: Values of a model that are no fields of its configuration.
_OF_MODEL = ("dtype", "param_dtype", "precision", "seed")


class RayDistributedTrainer:
    """Creates a model of a size, or loads one, and trains it; each worker of Ray has one object.

    The object itself does not call Ray, as in EasyDeL. `elarge launch` starts the processes of
    several hosts, with Ray or without (docs/tasks/several_hosts.md).

    Args:
        pretrained_model_name_or_path: the repository or directory of the tokenizer.
        bucket_path: a saved state with which training begins.
        model_task, model_type: the model; None: those of `model_class`.
        model_class: the model; None: the class of `model_type` and `model_task`.
        state_class: the class of states.
        offload_backend: without effect, as in EasyDeL; saved with the configuration.
        trainer_module: the trainer; None: `SFTTrainer`.
        config_scaling_variables: sizes that `scaling_index` multiplies, beside `SCALED_SIZES`.
        config_variables: the other fields of a new model, beside `MODEL_VALUES`. A default that
            the model does not have is not used.

    Raises:
        ConfigError: neither a class nor a type with its task is given.
    """

    def __init__(
        self,
        pretrained_model_name_or_path: str,
        bucket_path: str | None = None,
        model_task: TaskType | str | None = None,
        model_type: str | None = None,
        model_class: type[EasyDeLBaseModule] | None = None,
        state_class: type[EasyDeLState] | None = None,
        offload_backend: str | None = None,
        trainer_module: type[Trainer] | None = None,
        config_scaling_variables: Mapping[str, int] | None = None,
        config_variables: Mapping[str, object] | None = None,
    ):
        if model_class is not None:
            model_type, model_task = find_model_type(model_class)
        elif model_type is None or model_task is None:
            raise ConfigError("pass model_class, or model_type and model_task")
        self.pretrained_model_name_or_path = pretrained_model_name_or_path
        self.bucket_path, self.model_type = bucket_path, model_type
        self.model_task = canonical_task(model_task)
        self.model_class = model_class or cast(
            "type[EasyDeLBaseModule]", registry.get_module(self.model_task, model_type)
        )
        self.state_class = state_class or EasyDeLState
        self.trainer_module = trainer_module or SFTTrainer
        self.offload_backend = offload_backend or "cpu"
        self.config_scaling_variables = {**SCALED_SIZES, **(config_scaling_variables or {})}
        self.config_variables = {**MODEL_VALUES, **(config_variables or {})}
        self._given = {*(config_scaling_variables or ()), *(config_variables or ())}

    @classmethod
    def from_config(
        cls,
        path: str | Path,
        model_class: type[EasyDeLBaseModule] | None = None,
        state_class: type[EasyDeLState] | None = None,
        trainer_module: type[Trainer] | None = None,
    ) -> RayDistributedTrainer:
        """Return the object that `save_config` saved."""
        values = json.loads(Path(path).read_text("utf-8"))
        return cls(
            **values,
            model_class=model_class,
            state_class=state_class,
            trainer_module=trainer_module,
        )

    def save_config(self, path: str | Path) -> None:
        """Write the names, sizes and values to a file of JSON."""
        names = ("pretrained_model_name_or_path", "model_type", "offload_backend")
        values: dict[str, object] = {name: getattr(self, name) for name in names}
        values["model_task"] = str(self.model_task.value)
        for name in ("config_scaling_variables", "config_variables"):
            pairs: Mapping[str, object] = getattr(self, name)
            values[name] = {key: value for key, value in pairs.items() if key in self._given}
        Path(path).write_text(json.dumps(values, indent=2, default=_name_value) + "\n", "utf-8")

    @cached_property
    def processor(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with the end token for padding if it has no other."""
        return self.load_processor()

    def load_processor(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer; see `processor`."""
        tokenizer = AutoTokenizer.from_pretrained(self.pretrained_model_name_or_path)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token_id = tokenizer.eos_token_id
        return tokenizer

    @staticmethod
    def extract_column_names(dataset: Iterable[Mapping[str, object]]) -> list[str] | None:
        """Return the columns of a data set: its own list, or those of its first row."""
        names = getattr(dataset, "column_names", None)
        if names:
            return list(names)
        first = next(iter(dataset), None)
        return None if first is None else list(first)

    def process_sample_data(
        self, sample: str, max_length: int, padding_side: Literal["left", "right"] = "left"
    ) -> dict[str, np.ndarray]:
        """Return the ids and the mask of a text, padded or cut to a length."""
        return self._encode([sample], max_length, padding_side)

    def process_messages_data(
        self,
        messages: Sequence[Mapping[str, str]],
        max_length: int,
        padding_side: Literal["left", "right"] = "left",
    ) -> dict[str, np.ndarray]:
        """Return the ids and the mask of a chat, padded or cut to a length."""
        text = self.processor.apply_chat_template([dict(one) for one in messages], tokenize=False)
        return self._encode([cast(str, text)], max_length, padding_side, add_special_tokens=False)

    def _encode(
        self, texts: list[str], length: int, side: str, add_special_tokens: bool = True
    ) -> dict[str, np.ndarray]:
        encoded = self.processor(
            texts,
            padding="max_length",
            truncation=True,
            max_length=length,
            padding_side=side,
            return_tensors="np",
            add_special_tokens=add_special_tokens,
        )
        return {name: np.asarray(values).reshape(-1) for name, values in encoded.items()}

    def create_config(self, scaling_index: int) -> EasyDeLBaseConfig:
        """Return the configuration of a model of a size.

        Raises:
            ConfigError: `scaling_index` is below 1, or a given name is no field of the model.
        """
        if scaling_index < 1:
            raise ConfigError(f"scaling_index is {scaling_index}; it must be at least 1")
        config_class, _ = registry.get_modules_by_type(self.model_type, self.model_task)
        sizes = {
            name: value * scaling_index for name, value in self.config_scaling_variables.items()
        }
        values = {k: v for k, v in self.config_variables.items() if k not in _OF_MODEL} | sizes
        known = known_names(config_class)
        return config_class(**{k: v for k, v in values.items() if k in known or k in self._given})

    def create_model(
        self,
        config: EasyDeLBaseConfig,
        dtype: DTypeLike = "bfloat16",
        param_dtype: DTypeLike = "bfloat16",
        precision: str | None = None,
        seed: int = 684,
        lazy: bool = False,
    ) -> EasyDeLBaseModule:
        """Return a model with random parameters; with `lazy` a model with shapes only."""
        if lazy:
            return self.model_class.lazy_init(config)
        return self.model_class.create(
            config, seed=seed, dtype=dtype, param_dtype=param_dtype, precision=precision
        )

    def create_model_from_config(self, scaling_index: int) -> EasyDeLBaseModule:
        """Return a model of a size, with `dtype`, `param_dtype`, `precision` and `seed`."""
        values = {name: self.config_variables[name] for name in _OF_MODEL}
        create = cast("Callable[..., EasyDeLBaseModule]", self.create_model)
        return create(self.create_config(scaling_index), **values)

    def convert_model_to_state(self, model: EasyDeLBaseModule) -> EasyDeLState:
        """Return the state of a model."""
        return model.to_state(self.state_class)

    def create_trainer(
        self,
        arguments: TrainingArguments,
        dataset_train: Iterable[GivenRow],
        dataset_eval: Iterable[GivenRow] | None = None,
        data_collator: Callable[..., Mapping[str, np.ndarray]] | None = None,
        state: EasyDeLState | None = None,
    ) -> Trainer:
        """Return the trainer of a state."""
        wanted = self.trainer_module.entry.arguments
        if type(arguments) is TrainingArguments and wanted is not TrainingArguments:
            values = {name: getattr(arguments, name) for name in arguments.model_fields_set}
            build = cast("Callable[..., TrainingArguments]", wanted)
            arguments = build(**values, **arguments.data_keys)
        return self.trainer_module(
            arguments=arguments,
            model=state,
            train_dataset=dataset_train,
            eval_dataset=dataset_eval,
            processing_class=self.processor,
            data_collator=data_collator,
        )

    def train(
        self,
        scaling_index: int,
        arguments: TrainingArguments,
        dataset_train: Iterable[GivenRow],
        dataset_eval: Iterable[GivenRow] | None = None,
        data_collator: Callable[..., Mapping[str, np.ndarray]] | None = None,
        model: EasyDeLBaseModule | None = None,
        state: EasyDeLState | None = None,
    ) -> TrainerOutput:
        """Train a state, a model, the state in `bucket_path`, or a new model of a size.

        Args:
            scaling_index: the size of a new model.
            arguments: options of the trainer; `resume_if_possible` continues a run.
            dataset_train, dataset_eval, data_collator: see `Trainer`.
            model, state: what is trained; a state has precedence.
        """
        if state is None and model is None and self.bucket_path is not None:
            dtype, param_dtype = (
                cast(DTypeLike, self.config_variables[name]) for name in ("dtype", "param_dtype")
            )
            state = self.state_class.load_state(
                self.bucket_path, dtype=dtype, param_dtype=param_dtype
            )
        if state is None:
            model = self.create_model_from_config(scaling_index) if model is None else model
            state = self.convert_model_to_state(model)
        trainer = self.create_trainer(arguments, dataset_train, dataset_eval, data_collator, state)
        return trainer.train()


def find_model_type(model_class: type[EasyDeLBaseModule]) -> tuple[str, TaskType]:
    """Return the model type and the task of a class.

    Raises:
        ConfigError: the class is not registered.
    """
    model_type = str(getattr(model_class.config_class, "model_type", ""))
    for task in registry.list_tasks(model_type) if model_type else ():
        if registry.get_module(task, model_type) is model_class:
            return model_type, task
    raise ConfigError(
        f"{model_class.__name__} is not registered: register it with register_module, or pass "
        "model_type and model_task"
    )


def _name_value(value: object) -> str:
    """Return the text of a dtype, an enum or a precision, which JSON does not have."""
    return str(getattr(value, "name", None) or getattr(value, "__name__", None) or value)
