"""`eLargeModel`: one object from configuration to trained, evaluated and served model."""

from __future__ import annotations

import pkgutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ed_infra.chats import Chat, Prompt
from ed_infra.errors import ConfigError
from ed_infra.options import Options
from ed_infra.package_files import get_source_name
from ed_trainers.arguments import TrainingArguments

from ed_elarge.config import nodes
from ed_elarge.config.action_options import EvalOptions, GenerateOptions, ServeOptions
from ed_elarge.config.description import describe_run_file
from ed_elarge.config.normalize import check_sections, normalize
from ed_elarge.config.run_config import RunConfig
from ed_elarge.config.table import SECTIONS, check_machine
from ed_elarge.config.validation import validate_values
from ed_elarge.errors import Document, InputError
from ed_elarge.setters import Setters

if TYPE_CHECKING:
    from ed_data.batches.loader import Loader, StreamLoader
    from ed_esurge.engine import eSurge
    from ed_infra.config import EasyDeLBaseConfig
    from ed_models.tasks.causal_lm import CausalLM
    from ed_trainers.callbacks import Callback
    from ed_trainers.rewards import RewardFunction
    from ed_trainers.state import EasyDeLState
    from ed_trainers.trainer import Trainer, TrainerOutput
    from transformers import PreTrainedTokenizerBase

    from ed_elarge.evaluation.harness import Tasks
    from ed_elarge.evaluation.local import LocalTasks

T = TypeVar("T")
OptionsT = TypeVar("OptionsT", bound=Options)

#: Part -> the section that describes the part, and the address of its builder.
_PARTS = {p: (name, at) for name, section in SECTIONS.items() for p, at in section.builds.items()}


class eLargeModel(Setters):
    """Builds, trains, evaluates and serves a model from a configuration.

    Setters return the object, so that calls can be chained. A setter validates its keys and values
    immediately. Constraints between sections are checked by `validate_values` and before a part
    is built. Parts are cached until the configuration changes or `clear_cache` is called.

    Args:
        config: The sections as a mapping (see `docs/yaml.md`), or the path of a YAML or JSON file.

    Raises:
        InputError: A key is unknown, or a value is invalid.
    """

    def __init__(self, config: Mapping[str, Any] | str | Path | None = None) -> None:
        self._built: dict[str, Any] = {}
        self._run: RunConfig | None = None
        self.watchers: tuple[Callback, ...] = ()
        #: Number of updates after which training stops with a checkpoint; None: all of the run.
        self.last_step: int | None = None
        self.reward_functions: tuple[RewardFunction, ...] = ()
        #: Functions that replace `tools` of the section `trainer`.
        self.tools: tuple[Callable[..., object], ...] = ()
        #: Configuration of a model that Python code gives, which no folder contains.
        self.given_config: EasyDeLBaseConfig | None = None
        #: Whether the section `esurge` describes several models, so that a key may lack an effect.
        self.shares_options = False
        if isinstance(config, (str, Path)):
            self._document = nodes.read_yaml(config)
            self._run = self._check()
            return
        self._document = Document("configuration", value={})
        if config:
            self.update_config(config)

    # Reading and writing configurations.

    @classmethod
    def from_pretrained(
        cls, name_or_path: str, *, task: str | None = None, **model: object
    ) -> Self:
        """Create a configuration for a model: a directory in Hugging Face layout, or a hub id."""
        section = {"name_or_path": name_or_path, **model}
        return cls({"model": section if task is None else {**section, "task": task}})

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read a run file."""
        return cls(path)

    @classmethod
    def from_json(cls, path: str | Path) -> Self:
        """Read a configuration that was saved as JSON."""
        return cls(path)

    @classmethod
    def from_run(cls, run: RunConfig) -> Self:
        """Create the object from a validated configuration."""
        self = cls()
        self._document, self._run = run.document, run
        return self

    @property
    def config(self) -> RunConfig:
        """The validated configuration: sections with defaults and derived values.

        Raises:
            InputError: all that is wrong with it.
        """
        if self._run is None:
            self._run = self._check()
        return self._run

    def _check(self) -> RunConfig:
        run = normalize(self._document)
        for text in run.warning_texts():
            warnings.warn(text, stacklevel=4)
        return run

    def to_dict(self) -> dict[str, Any]:
        """Return the canonical configuration, including defaults, as JSON values."""
        return self.config.to_dict()

    def to_sections(self) -> dict[str, Any]:
        """Return the sections as they were written, without `actions`."""
        value = self._document.value or {}
        return {key: section for key, section in value.items() if key != "actions"}

    def to_yaml(self, path: str | Path) -> None:
        """Save the configuration as YAML."""
        _write(path, self.config.to_yaml())

    def to_json(self, path: str | Path) -> None:
        """Save the configuration as JSON."""
        _write(path, self.config.to_json())

    def validate(self) -> Self:
        """Check the configuration without loading models or data.

        Raises:
            InputError: all that is wrong.
        """
        if self.config.model is None:
            raise self.config.missing("model")
        check_machine(self.config)
        return self

    def __repr__(self) -> str:
        return f"eLargeModel({', '.join(self._document.value or {})})"

    def __str__(self) -> str:
        return describe_run_file(self.config)

    def update_config(self, config: Mapping[str, Any]) -> Self:
        """Merge sections into the configuration; lists and plain values replace the old values."""
        value = _merge_values(self._document.value or {}, config)
        problems = check_sections({k: v for k, v in value.items() if k != "actions"})
        if problems:
            raise InputError("configuration", problems)
        self._document, self._run = Document("configuration", value=value), None
        return self.clear_cache()

    def set_watchers(self, *watchers: Callback) -> Self:
        """Set the callbacks of the trainer, which run at events of training.

        Args:
            watchers: Objects of `ed_trainers.Callback`; they replace earlier ones.
        """
        self.watchers = watchers
        return self.clear_cache()

    # Building; each part is built once.

    def part(self, name: str) -> Any:
        """Return a part of `ed_elarge.config.table.SECTIONS`; the first call builds it.

        Raises:
            InputError: the section of the part is missing, or the part cannot be built from it.
        """
        section, builder = _PARTS[name]
        if self.config.sections[section] is None:
            raise self.config.missing(section)
        with self.config.blame(section):
            return self.once(name, lambda: pkgutil.resolve_name(builder)(self))

    def has_built(self, name: str) -> bool:
        """Return whether a part is in memory."""
        return name in self._built

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return the cached value of `name`; the first call creates it with `make`."""
        if name not in self._built:
            self._built[name] = make()
        return self._built[name]

    def with_engine_options(self, changes: Mapping[str, object]) -> Self:
        """Return the same model with other options of the engine, and release an earlier engine.

        Args:
            changes: Keys of the section `esurge`.
        """
        run = self.config
        engine = run.esurge.replace(**changes).model_dump(mode="json", exclude_unset=True)
        document = Document(run.document.name, value={**run.written, "esurge": engine})
        other = type(self).from_run(normalize(document))
        self._built.pop("engine", None)
        other._built, other.given_rows = dict(self._built), self.given_rows
        return other

    def build_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load or train the tokenizer."""
        return self.part("tokenizer")

    def build_state(self) -> EasyDeLState:
        """Create the initial training state of the model."""
        return self.build_model().to_state()

    def build_model(self) -> CausalLM:
        """Create or load the model on its devices."""
        return self.part("model")

    def give(self, **parts: object) -> Self:
        """Use objects as parts, such as `model` or `tokenizer`, instead of building them."""
        self._built |= parts
        return self

    def use_model(self, model: CausalLM) -> Self:
        """Use a module as the model, such as one that was trained elsewhere."""
        self._built.pop("engine", None)
        self._built["model"] = model
        return self

    def build_reference_model(self) -> CausalLM:
        """Load the model of the section `reference_model`."""
        return self.part("reference")

    def build_teacher_model(self) -> CausalLM:
        """Load the model of the section `teacher_model`."""
        return self.part("teacher")

    def build_reward_model(self) -> CausalLM:
        """Load the model of the section `reward_model`."""
        return self.part("reward")

    def build_dataset(self) -> Loader | StreamLoader:
        """Return the loader of training batches."""
        return self.part("loaders")[0]

    def build_sharded_source(self) -> Loader | StreamLoader:
        """Return `build_dataset()`: every host reads only its rows of each batch."""
        return self.build_dataset()

    def build_eval_dataset(self) -> Loader | StreamLoader | None:
        """Return the loader of held-out batches, or None if no data is held out."""
        return self.part("loaders")[1]

    def build_training_arguments(self) -> TrainingArguments:
        """Return the arguments of the trainer, including derived values."""
        if self.config.trainer is None:
            raise self.config.missing("trainer")
        return self.config.trainer

    def build_trainer(self) -> Trainer:
        """Create the trainer with model, tokenizer and data."""
        return self.part("trainer")

    def build_esurge(self) -> eSurge:
        """Create the engine of a model of texts.

        Raises:
            ConfigError: the model transcribes audio, which only `serve` supports.
        """
        from ed_esurge.speech.engine import SpeechEngine

        engine = self.part("engine")
        if isinstance(engine, SpeechEngine):
            raise ConfigError(
                f"the model {self.config.model and self.config.model.name_or_path} transcribes "
                "audio: use the action serve, and send files to /v1/audio/transcriptions"
            )
        return engine

    def held_out_texts(self) -> list[str]:
        """Return the texts that are held out from training."""
        return self.part("held_out_texts") if self.config.has_held_out else []

    def clear_cache(self) -> Self:
        """Release all parts; the configuration is kept."""
        for loader in self._built.get("loaders") or ():
            if loader is not None:
                loader.close()
        self._built.clear()
        return self

    # Actions.

    def train(
        self,
        train_dataset: object = None,
        eval_dataset: object = None,
        *,
        reward_funcs: RewardFunction | Sequence[RewardFunction] = (),
    ) -> TrainerOutput:
        """Train the model, from the newest checkpoint of the run if there is one.

        Args:
            train_dataset: Rows that replace `informs` of the section `mixture`.
            eval_dataset: Rows that replace its `eval_informs`.
            reward_funcs: Functions that replace `reward_functions` of the section `trainer`.
        """
        if train_dataset is not None or eval_dataset is not None:
            give_data = pkgutil.resolve_name("ed_elarge.building.given_rows:give_data")
            return give_data(self, train_dataset, eval_dataset).train(reward_funcs=reward_funcs)
        if reward_funcs:
            functions = (reward_funcs,) if callable(reward_funcs) else tuple(reward_funcs)
            self.reward_functions = functions
        trainer = self.build_trainer()
        self._built.pop("engine", None)  # has the untrained weights
        path = (*self.config.prefix, "trainer", "save_directory")
        with self.config.blame_trainer(path):
            return trainer.train(until=self.last_step)

    def eval(
        self, tasks: Sequence[str] | str | None = None, *, engine: str = "auto", **options: object
    ) -> dict[str, Any]:
        """Evaluate on the engine with lm-evaluation-harness, or on local tasks.

        Args:
            tasks: Task names; the default is `tasks` of the section `eval`, then all of its
                `local_tasks`.
            engine: `esurge` or `auto`, which selects `esurge`.
            options: Keys of the section `eval` for this call.

        Returns:
            The results, in the form of lm-eval; the metrics of a task have their names with and
            without the filter (`acc,none`, `acc`). The results are also written to a JSON file
            (`output_path`); without a trainer only if `output_path` is set.

        Raises:
            ConfigError: An option is invalid, a task is unknown, or its data is not available.
        """
        if tasks is not None:
            options["tasks"] = [tasks] if isinstance(tasks, str) else list(tasks)
        from ed_elarge.evaluation.harness import add_plain_names

        prepared = self.prepare_eval(_options(EvalOptions, {"engine": engine, **options}))
        return add_plain_names(prepared.run(self.build_esurge()))

    def run_benchmarks(
        self, tasks: Sequence[str] | str | None = None, **options: Any
    ) -> dict[str, dict[str, float]]:
        """Evaluate the model as it is now on benchmarks, and return the metrics of each task.

        Args:
            tasks: Task names; the default is `trainer.benchmarks`, then `eval.tasks`.
            options: Keys of the section `eval` for this call.
        """
        from ed_elarge.evaluation import harness

        trainer = self.config.trainer
        if tasks is None and trainer is not None and trainer.benchmarks:
            tasks = trainer.benchmarks
        return harness.list_figures(self.eval(tasks, **options))

    def prepare_eval(self, options: EvalOptions) -> Tasks | LocalTasks:
        """Load the tasks of an evaluation and their data, for a later `eval`."""
        from ed_elarge.config import local_tasks
        from ed_elarge.evaluation import harness, local

        merged = options.over(self.config.eval)
        directory = self.config.directory / "eval" if self.config.trainer is not None else None
        selected_tasks = local_tasks.select_tasks(merged.local_tasks, merged.tasks)

        def load() -> Tasks | LocalTasks:
            if selected_tasks:
                return local.LocalTasks(merged, selected_tasks, directory)
            return harness.Tasks(merged, self.held_out_texts, directory)

        return self.once(f"tasks {merged.model_dump_json()}", load)

    def generate(
        self, prompts: Sequence[Prompt] | Chat | str | None = None, **options: object
    ) -> list[tuple[Prompt, str]]:
        """Complete prompts with the engine.

        Args:
            prompts: Texts, conversations (lists of messages), or one of them. The default is the
                beginning of a held-out text or chat.
            options: Keys of the `generate` action.

        Returns:
            A pair of prompt and completion for each prompt.

        Raises:
            ConfigError: A prompt is a conversation, and the tokenizer has no chat template.
        """
        from ed_esurge.sampling import SamplingParams
        from ed_esurge.template import ChatTemplate

        from ed_elarge.evaluation.prompts import held_out_prompt

        keys = options if prompts is None else {**options, "prompts": prompts}
        values = _options(GenerateOptions, keys).model_dump()
        all_prompts = values.pop("prompts") or [held_out_prompt(self.config, self.held_out_texts())]
        params = SamplingParams(max_tokens=values.pop("max_new_tokens"), **values)
        engine = self.build_esurge()
        ready: list[Any] = [
            p if isinstance(p, str) else ChatTemplate(engine.tokenizer).token_ids(p)
            for p in all_prompts
        ]
        outputs = engine.generate(ready, params)
        return [(p, out.outputs[0].text) for p, out in zip(all_prompts, outputs, strict=True)]

    def serve(
        self, on_ready: Callable[[str, Sequence[str]], object] | None = None, /, **options: object
    ) -> None:
        """Serve the OpenAI-compatible API until interrupted, with options of the `serve` action.

        Args:
            on_ready: see `ed_esurge.server.serve`.
            options: see `ServeOptions`.
        """
        from ed_esurge.server import serve
        from ed_esurge.server.launch import load_adapters
        from ed_esurge.server.options import ListenOptions

        # An invalid file of keys is an error before the model loads.
        checked = _options(ServeOptions, options).with_read_keys()
        values = {name: getattr(checked, name) for name in ListenOptions.model_fields}
        path = Path(getattr(self.config.model, "name_or_path", None) or self.config.directory)
        names = list(checked.served_model_name or ()) or self._model_names(path)
        if not checked.also:  # several models have the names of their mapping
            values["served_model_name"] = names if len(names) > 1 else names[0]
        serving = pkgutil.resolve_name("ed_elarge.building.serving:running_engines")
        if checked.model_directory is not None:
            build_directory = pkgutil.resolve_name("ed_elarge.building.serving:build_directory")
            values["model_directory"] = build_directory(self, checked)
        address = values.pop("host"), values.pop("port")
        with serving(self, checked, names[0]) as engines:
            load_adapters(engines, checked.lora_modules)
            callback = {} if on_ready is None else {"on_ready": on_ready}
            serve(engines, *address, **callback, **values)

    def _model_names(self, path: Path) -> list[str]:
        """Return the names of the model in requests: the name of its source, and the name of the
        run file. An absolute path is no name: it would tell clients the folders of the host."""
        names = [get_source_name(str(path.resolve() if path.exists() else path)) or "model"]
        model_name = getattr(self.config.model, "name_or_path", None)
        if (
            model_name
            and model_name not in names
            and not Path(model_name).expanduser().is_absolute()
        ):
            names.append(model_name)
        return names


def _options(cls: type[OptionsT], keys: Mapping[str, Any]) -> OptionsT:
    value, problems = validate_values(cls, keys, ())
    if value is None:
        raise InputError("options", problems)
    return value


def _merge_values(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested mappings; values of `new` replace values of `old`."""
    out = dict(old)
    for key, value in new.items():
        old_value = out.get(key)
        if isinstance(old_value, Mapping) and isinstance(value, Mapping):
            value = _merge_values(old_value, value)
        out[key] = value
    return out


def _write(path: str | Path, text: str) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
