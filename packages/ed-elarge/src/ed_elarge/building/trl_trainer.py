"""The trainers of `ed_elarge.trl`: objects of a script of TRL as the parts of a run file."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from ed_infra.errors import ConfigError
from ed_infra.logging import get_logger
from ed_trainers.rewards.rules import RULES

from ed_elarge.building.given_rows import GIVEN_MODEL, build_mixture
from ed_elarge.building.tools import name_function
from ed_elarge.building.trl_scripts import (
    TrlConfig,
    build_run,
    convert_adapters,
    convert_arguments,
    describe_unknown,
    refuse_changes,
)
from ed_elarge.config.run_config import RunConfig
from ed_elarge.migration.conversion import Conversion
from ed_elarge.migration.trl_arguments import TrlMethod
from ed_elarge.migration.trl_files import put_bits
from ed_elarge.model import eLargeModel

if TYPE_CHECKING:
    from ed_models.protocol import LanguageModel
    from ed_models.tasks.causal_lm import CausalLM
    from ed_trainers.trainer import Trainer, TrainerOutput
    from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)

_ENVIRONMENT = "write trainer.environment in a run file, see docs/tasks/asynchronous_rl.md"
#: Argument of a trainer of TRL -> what to use instead.
_REFUSED = {
    "data_collator": "rows are prepared by the method: omit it, or use ed_trainers with "
    "data_collator",
    "compute_loss_func": "a loss of one's own is a method of ed_trainers (docs/methods.md)",
    "compute_metrics": "an evaluation reports loss, perplexity and the metrics of the method",
    "preprocess_logits_for_metrics": "an evaluation keeps no logits",
    "optimizers": "set optim, learning_rate and lr_scheduler_type of the configuration",
    "optimizer_cls_and_kwargs": "set optim and learning_rate of the configuration",
    "model_init": "pass the model",
    "reward_processing_classes": "a reward model is read with its own tokenizer",
    "rollout_func": "the engine of this project samples completions",
    "environment_factory": _ENVIRONMENT,
}
#: Argument of a trainer of TRL -> the role of the model.
_ROLES = {"ref_model": "reference", "teacher_model": "teacher", "reward_model": "reward"}
#: Fields of prompts, which reward functions receive under other names.
_PROMPT_FIELDS = ("prompt", "images", "image", "chosen", "rejected", "completion")
#: Name of an earlier version -> argument of a trainer.
_OLDER_TRAINER_NAMES = {"tokenizer": "processing_class", "dataset": "train_dataset"}


class TrainOutput(NamedTuple):
    """The result of `train`, with the names of transformers.

    Attributes:
        global_step: number of optimizer steps.
        training_loss: the loss of the last logged step.
        metrics: the metrics at the end.
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class TrlTrainer:
    """A trainer with the arguments of TRL.

    Attributes:
        trl_method: the method.
        config_class: class of `args`.
        args: the configuration.
        trainer: the trainer of `ed_trainers`.
        notes: argument -> why it is not needed here.

    Raises:
        ConfigError: an argument is unknown or invalid, or has no counterpart.
    """

    trl_method: ClassVar[TrlMethod]
    config_class: ClassVar[type[TrlConfig]]

    def __init__(self, *values: object, **arguments: object) -> None:
        given = self._bind(values, arguments)
        self.args = self._read_config(given.pop("args", None), given.get("model"))
        conversion = self._convert(given)
        self._put_tools(conversion, given.get("tools", ()))
        roles = self._put_roles(conversion, given)
        functions = self._put_rewards(conversion, given.get("reward_funcs"), roles)
        self._elm = self._build(conversion, given, roles, functions)
        self.notes = dict(conversion.omitted)
        for name, reason in self.notes.items():
            logger.info("%s: %s has no effect: %s", type(self).__name__, name, reason)
        self.trainer: Trainer = self._elm.build_trainer()

    # Arguments.

    def _bind(self, values: Sequence[object], arguments: Mapping[str, object]) -> dict[str, Any]:
        """Return the arguments by name, without those that are None."""
        name, names = type(self).__name__, self.trl_method.trainer_arguments
        if len(values) > len(names):
            raise ConfigError(f"{name} has {len(names)} arguments, not {len(values)}")
        given = dict(zip(names, values, strict=False))
        for key, value in arguments.items():
            key = _OLDER_TRAINER_NAMES.get(key, key)
            if key not in names:
                raise ConfigError(describe_unknown(name, key, names))
            if key in given:
                raise ConfigError(f"{name} has two values of {key}: pass one of them")
            given[key] = value
        given = {key: value for key, value in given.items() if value is not None}
        if given.get("optimizers") == (None, None):
            del given["optimizers"]
        for key in given.keys() & _REFUSED.keys():
            raise ConfigError(f"{name}: {key} has no counterpart here: {_REFUSED[key]}")
        for key in ("model", "train_dataset"):
            if key not in given:
                raise ConfigError(f"{name} trains a model on rows: pass {key}")
        return given

    def _read_config(self, args: object, model: object) -> TrlConfig:
        if isinstance(args, Mapping):
            args = self.config_class(**args)
        if args is None:
            name = Path(str(model)).name if isinstance(model, str | Path) else "model"
            args = self.config_class(f"{name}-{self.trl_method.name}")
        if not isinstance(args, self.config_class):
            raise ConfigError(
                f"args of {type(self).__name__} is a {type(args).__name__}: pass "
                f"{self.config_class.__name__} of ed_elarge.trl"
            )
        return args

    def _convert(self, given: Mapping[str, Any]) -> Conversion:
        """Convert the configuration, the adapters and the quantization."""
        import jax

        name = self.config_class.__name__
        backend = "cpu" if self.args.use_cpu else None
        devices = jax.device_count(backend) if backend else jax.device_count()
        conversion = convert_arguments(self.trl_method, self.args.given, devices)
        if not self.args.given.get("output_dir"):
            conversion.put("trainer.save_directory", "trainer_output", "default of TRL")
        if "quantization_config" in given:
            put_bits(conversion, "quantization_config", given["quantization_config"])
            refuse_changes(conversion, type(self).__name__, given)
        if "peft_config" in given:
            convert_adapters(conversion, given["peft_config"])
        logger.debug("%s: %s", name, conversion.values)
        return conversion

    def _put_tools(self, conversion: Conversion, tools: Sequence[Any]) -> None:
        """Set the names of the tools, whose functions themselves are given to the run."""
        if tools:
            conversion.put("trainer.tools", [name_function(tool) for tool in tools])
        else:
            conversion.values.pop("trainer.max_turns", None)  # without effect, as in TRL

    def _put_roles(self, conversion: Conversion, given: Mapping[str, Any]) -> dict[str, object]:
        """Set the sections of the other models, and return those that are objects, by role."""
        roles: dict[str, object] = {}
        for argument, role in _ROLES.items():
            model = given.get(argument)
            if model is not None:
                self._put_model(conversion, f"{role}_model", model, roles)
        return roles

    def _put_model(
        self, conversion: Conversion, section: str, model: object, objects: dict[str, object]
    ) -> None:
        """Set the place of a model: its location, or a mark of an object."""
        if isinstance(model, str | Path):
            conversion.put(f"{section}.name_or_path", str(model))
            return
        if not hasattr(model, "input_names"):
            raise ConfigError(
                f"{section} is a {type(model).__module__}.{type(model).__name__}: pass a folder, a "
                "GGUF file, package:NAME/FILE or a hub id, or a model of AutoModelForCausalLM of "
                "ed_elarge.trl"
            )
        conversion.put(f"{section}.name_or_path", GIVEN_MODEL)
        objects[section.removesuffix("_model")] = model

    def _put_rewards(
        self, conversion: Conversion, rewards: object, roles: dict[str, object]
    ) -> tuple[Callable[..., Any], ...]:
        """Set the rewards, and return their functions.

        A text is the name of a rule, `module:function`, or the location of a reward model.
        """
        if rewards is None:
            return ()
        entries = list(rewards) if isinstance(rewards, list | tuple) else [rewards]
        functions: list[Any] = []
        models: list[object] = []
        for entry in entries:
            if callable(entry) and not hasattr(entry, "input_names"):
                functions.append(_run_coroutines(entry))
            elif isinstance(entry, str) and (entry in RULES or _names_function(entry)):
                functions.append(entry)
            else:
                models.append(entry)
        if len(models) > 1:
            raise ConfigError(
                f"reward_funcs has {len(models)} reward models: a run has one, and any number of "
                "functions"
            )
        for model in models:
            self._put_model(conversion, "reward_model", model, roles)
        return tuple(functions)

    # Building.

    def _build(
        self,
        conversion: Conversion,
        given: Mapping[str, Any],
        roles: dict[str, object],
        functions: tuple[Any, ...],
    ) -> eLargeModel:
        objects: dict[str, object] = {}
        model = given["model"]
        self._put_model(conversion, "model", model, objects)
        task = getattr(model, "model_task", None)
        if objects and task is not None:
            conversion.put("model.task", str(task.value))
        tokenizer = given.get("processing_class")
        if (
            objects
            and tokenizer is None
            and "model.tokenizer.name_or_path" not in (conversion.values)
        ):
            conversion.put("model.tokenizer.name_or_path", _find_source(model))
        rows = [self._read_rows(given, name) for name in ("train_dataset", "eval_dataset")]
        mixture, given_rows = build_mixture(rows[0], rows[1], {})
        self._put_fields(conversion, mixture, rows, functions)
        conversion.values.pop("content_field", None)
        names = [entry for entry in functions if isinstance(entry, str)]
        if names and len(names) == len(functions):
            conversion.put("trainer.reward_functions", names, "reward_funcs")
        text_config = model.config.get_text_config() if objects else None
        positions = getattr(text_config, "max_position_embeddings", None)
        run = build_run(conversion, type(self).__name__, {"mixture": mixture}, positions)
        elm = eLargeModel.from_run(run)
        elm.given_rows = given_rows
        elm.tools = tuple(given.get("tools", ()))
        if functions and len(names) < len(functions):
            from ed_trainers.rewards import reward_function

            elm.reward_functions = tuple(reward_function(entry)[1] for entry in functions)
        self._give_parts(elm, run, model if objects else None, tokenizer, roles)
        elm.watchers = tuple(_read_callbacks(self, given.get("callbacks") or ()))
        return elm

    def _give_parts(
        self,
        elm: eLargeModel,
        run: RunConfig,
        model: LanguageModel | None,
        tokenizer: PreTrainedTokenizerBase | None,
        roles: Mapping[str, object],
    ) -> None:
        """Give the objects of the script to the run."""
        if tokenizer is not None:
            if run.has_processor:
                elm.give(processor=tokenizer, tokenizer=getattr(tokenizer, "tokenizer", None))
            else:
                elm.give(tokenizer=tokenizer)
            template = self.args.given.get("chat_template_path")
            if template is not None:
                self._set_template(tokenizer, str(template))
        for name in ("eos_token", "pad_token"):
            token = self.args.given.get(name)
            if token is not None:
                _set_token(elm.build_tokenizer(), name, str(token))
        elm.give(**roles)
        if model is not None:
            from ed_elarge.building.parts import add_adapters

            elm.given_config = model.config
            elm.give(model=add_adapters(elm, cast("CausalLM", model)))

    def _set_template(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        from ed_models.checkpoints.tokenizers import load_tokenizer, set_chat_template

        if source.endswith((".jinja", ".jinja2")):
            set_chat_template(tokenizer, source)
        else:
            tokenizer.chat_template = load_tokenizer(source).chat_template

    def _read_rows(self, given: Mapping[str, Any], name: str) -> Any:
        rows = given.get(name)
        if isinstance(rows, Mapping):
            raise ConfigError(
                f"{name} is a mapping of data sets with the keys {', '.join(map(str, rows))}: pass "
                "one of them"
            )
        function = given.get("formatting_func")
        return rows if rows is None or function is None else format_rows(rows, function)

    def _put_fields(
        self,
        conversion: Conversion,
        mixture: Mapping[str, Any],
        rows: Sequence[Any],
        functions: Sequence[object],
    ) -> None:
        """Name the field of texts, and the fields that reward functions may read."""
        field = conversion.values.get("content_field")
        informs = [inform for key in ("informs", "eval_informs") for inform in mixture.get(key, ())]
        for inform, source in zip(informs, [one for one in rows if one is not None], strict=True):
            first = next(iter(source), None)
            if not isinstance(first, Mapping):
                continue
            if field in first:
                inform["content_field"] = field
            if any(_takes_all_fields(function) for function in functions):
                others = [name for name in first if name not in _PROMPT_FIELDS]
                inform["additional_fields"] = others

    # The interface of `transformers.Trainer`.

    @property
    def model(self) -> Any:
        """The model with its present weights."""
        return self.trainer.model

    @property
    def processing_class(self) -> Any:
        """The tokenizer, or the processor."""
        return self.trainer.processing_class

    tokenizer = processing_class

    @property
    def accelerator(self) -> Any:
        """The attributes of Accelerate's object that scripts read."""
        is_main = self.is_world_process_zero()
        return SimpleNamespace(is_main_process=is_main, print=print if is_main else _print_nothing)

    @property
    def state(self) -> Any:
        """The progress: `global_step`, `max_steps`, and the rows of metrics as `log_history`."""
        path = self._folder / "metrics.jsonl"
        lines = path.read_text("utf-8").splitlines() if path.is_file() else []
        history = [json.loads(line) for line in lines]
        steps = [row["step"] for row in history if isinstance(row.get("step"), int)]
        return SimpleNamespace(
            global_step=max(steps, default=0),
            max_steps=self.trainer.total_steps,
            log_history=history,
            is_world_process_zero=self.is_world_process_zero(),
        )

    @property
    def _folder(self) -> Path:
        return Path(self.trainer.arguments.save_directory)

    def is_world_process_zero(self) -> bool:
        """Return whether this is the first process."""
        import jax

        return jax.process_index() == 0

    def train(self, resume_from_checkpoint: object = None) -> TrainOutput:
        """Train to the end.

        Args:
            resume_from_checkpoint: whether to continue from the newest checkpoint of `output_dir`;
                a folder has the same effect. None: the argument of the configuration. Without it,
                the files of an earlier run are moved to `earlier-1` in the folder.
        """
        from ed_trainers.checkpoints.run_record import move_aside

        resumes = resume_from_checkpoint
        if resumes is None:
            resumes = self.args.resume_from_checkpoint
        if not resumes and self.is_world_process_zero():
            moved = move_aside(self._folder)
            if moved is not None:
                print(f"the earlier run in {self._folder} was moved to {moved}", flush=True)
        output: TrainerOutput = self.trainer.train()
        metrics = dict(output.metrics)
        steps = int(metrics.get("steps", self.trainer.total_steps))
        return TrainOutput(steps, metrics.get("train_loss", float("nan")), metrics)

    def evaluate(self) -> dict[str, float]:
        """Return the loss and the other metrics over `eval_dataset`."""
        return self.trainer.evaluate()

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the model and the tokenizer; of a model with adapters, the adapters.

        Args:
            output_dir: the folder; None: `output_dir` of the configuration.
        """
        from ed_models.adapters.lora import has_lora

        folder = self._folder if output_dir is None else Path(output_dir)
        if not has_lora(self.model):
            self.trainer.save_model(folder)
            return
        self.model.save_pretrained(folder)
        if self.processing_class is not None and self.is_world_process_zero():
            self.processing_class.save_pretrained(folder)

    def push_to_hub(self, *values: object, **options: object) -> None:
        """Raise an error that names the command.

        Raises:
            ConfigError: always; this program sends nothing.
        """
        raise ConfigError(
            f"this trainer sends nothing to a hub: `hf upload ORG/NAME {self._folder / 'model'}`"
        )

    def log_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        """Print metrics."""
        for name, value in sorted(metrics.items()):
            print(f"  {split} {name} = {value}", flush=True)

    def save_metrics(self, split: str, metrics: Mapping[str, float]) -> None:
        """Write metrics to `<split>_results.json` in `output_dir`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dict(metrics), indent=4, sort_keys=True, default=float)
        (self._folder / f"{split}_results.json").write_text(text + "\n", "utf-8")

    def save_state(self) -> None:
        """Do nothing: every checkpoint contains the state."""


def format_rows(
    rows: Iterable[object], function: Callable[[Mapping[str, object]], object]
) -> Iterable[object]:
    """Return the texts of rows.

    Args:
        rows: a list, a data set of `datasets`, or another iterable of rows.
        function: `formatting_func` of TRL, which returns the text of a row.

    Raises:
        ConfigError: the function returns no text.
    """

    def build_text(row: Mapping[str, object]) -> dict[str, str]:
        text = function(row)
        if not isinstance(text, str):
            raise ConfigError(
                f"formatting_func returned a {type(text).__name__}: it receives one row and "
                "returns its text"
            )
        return {"text": text}

    if type(rows).__module__.partition(".")[0] == "datasets":
        columns = getattr(rows, "column_names", None)
        return getattr(rows, "map")(build_text, remove_columns=columns)  # noqa: B009
    return [build_text(cast("Mapping[str, object]", row)) for row in rows]


def _names_function(entry: str) -> bool:
    """Return whether a text is `module:function`, and not a model."""
    module, _, name = entry.partition(":")
    return bool(name) and name.isidentifier() and module not in ("package", "hf")


def _takes_all_fields(function: object) -> bool:
    if isinstance(function, str):
        return False
    parameters = inspect.signature(function).parameters.values()  # pyright: ignore
    return any(one.kind is one.VAR_KEYWORD or one.default is not one.empty for one in parameters)


def _run_coroutines(function: Callable[..., object]) -> Callable[..., object]:
    """Return a function that waits for the result of a coroutine."""
    if not inspect.iscoroutinefunction(function):
        return function

    @functools.wraps(function)
    def wait(*values: object, **arguments: object) -> object:
        return asyncio.run(
            cast("Coroutine[object, object, object]", function(*values, **arguments))
        )

    return wait


def _find_source(model: LanguageModel) -> str:
    source = getattr(model.config, "name_or_path", "") or getattr(model.config, "_name_or_path", "")
    if not source:
        raise ConfigError(
            "the model does not name its folder: pass the tokenizer as processing_class"
        )
    return str(source)


def _set_token(tokenizer: PreTrainedTokenizerBase, name: str, token: str) -> None:
    if tokenizer.convert_tokens_to_ids(token) in (None, tokenizer.unk_token_id):
        raise ConfigError(
            f"{name}={token!r} is no token of the tokenizer: use a tokenizer with this token"
        )
    setattr(tokenizer, name, token)


def _read_callbacks(trainer: TrlTrainer, callbacks: Iterable[Any]) -> Iterable[Any]:
    from ed_trainers.callbacks import Callback

    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"{type(callback).__name__} is no callback of this project: derive it from "
                "ed_trainers.Callback, whose methods on_log, on_evaluate and on_save receive the "
                "trainer"
            )
        yield callback


def _print_nothing(*values: object) -> None:
    """Print nothing: another process prints."""
