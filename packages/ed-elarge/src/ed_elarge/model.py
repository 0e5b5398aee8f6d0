"""`eLargeModel`: one object from configuration to trained, evaluated and served model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ed_infra.fields import FIELDS, canonical_field

from ed_elarge import build, describe, inference, nodes, normalize, surroundings
from ed_elarge.action_options import EvalOptions, GenerateOptions, ServeOptions
from ed_elarge.errors import InputError, Problem
from ed_elarge.nodes import Document
from ed_elarge.normalize import Run
from ed_elarge.sections import SECTIONS
from ed_elarge.validation import validate

if TYPE_CHECKING:
    from ed_esurge.engine import eSurge
    from ed_trainers.trainer import TrainerOutput


class eLargeModel:
    """Builds, trains, evaluates and serves what a configuration describes.

    Setters return the object, so that they can be chained; each checks the keys and the values it
    is given at once. What one section demands of another is checked when something is built, or by
    `validate`. Whatever is built is kept until the configuration changes or `clear_cache`.

    Args:
        config: the sections as a mapping (see `docs/yaml.md`), or the path of a YAML or JSON file.

    Raises:
        InputError: an unknown key, a value of the wrong type, ….
    """

    def __init__(self, config: Mapping[str, Any] | str | Path | None = None) -> None:
        self._built: dict[str, Any] = {}
        self._run: Run | None = None
        if isinstance(config, (str, Path)):
            self._document = nodes.read(config)
            self._run = normalize.normalize(self._document)
            return
        self._document = Document("configuration", value={})
        if config:
            self.update_config(config)

    # Where a configuration comes from and goes to.

    @classmethod
    def from_pretrained(cls, name_or_path: str, *, task: str | None = None, **model: Any) -> Self:
        """Begin with an existing model: a directory in Hugging Face layout, or a hub id."""
        given = {"name_or_path": name_or_path, **model}
        return cls({"model": given if task is None else {**given, "task": task}})

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read a run file."""
        return cls(path)

    @classmethod
    def from_json(cls, path: str | Path) -> Self:
        """Read a configuration that was saved as JSON."""
        return cls(path)

    @classmethod
    def from_run(cls, run: Run) -> Self:
        """Begin with a configuration that is checked already."""
        self = cls()
        self._document, self._run = run.origin.document, run
        return self

    @property
    def config(self) -> Run:
        """The whole configuration, checked: sections with defaults and derived values.

        Raises:
            InputError: all that is wrong with it.
        """
        if self._run is None:
            self._run = normalize.normalize(self._document)
        return self._run

    def to_dict(self) -> dict[str, Any]:
        """The canonical configuration, defaults included, as JSON values."""
        return self.config.to_dict()

    def to_yaml(self, path: str | Path) -> None:
        """Save the configuration as YAML."""
        _write(path, describe.to_yaml(self.config))

    def to_json(self, path: str | Path) -> None:
        """Save the configuration as JSON."""
        _write(path, describe.to_json(self.config))

    def validate(self) -> Self:
        """Check everything that can be checked without loading anything.

        Raises:
            InputError: all that is wrong.
        """
        build.require_model(self.config)
        surroundings.check(self.config)
        return self

    def __repr__(self) -> str:
        return f"eLargeModel({', '.join(self._document.value or {})})"

    def __str__(self) -> str:
        return describe.describe(self.config)

    # Setters.

    def update_config(self, config: Mapping[str, Any]) -> Self:
        """Merge sections into the configuration; lists and plain values replace what was there."""
        value = _merged(self._document.value or {}, config)
        problems = [p for name, section in value.items() for p in _check(name, section)]
        if problems:
            raise InputError("configuration", problems)
        self._document = Document("configuration", value=value)
        self._run = None
        self.clear_cache()
        return self

    def set_model(self, name_or_path: str | None = None, **model: Any) -> Self:
        """Set keys of `model`."""
        if name_or_path is not None:
            model["name_or_path"] = name_or_path
        return self.update_config({"model": model})

    def set_dtype(self, dtype: str, param_dtype: str | None = None) -> Self:
        """Set the dtype of computation, and of stored parameters (the same, if not given)."""
        return self.update_config({"loader": {"dtype": dtype, "param_dtype": param_dtype or dtype}})

    def set_loader(self, **loader: Any) -> Self:
        """Set keys of `loader`."""
        return self.update_config({"loader": loader})

    def set_sharding(self, **sharding: Any) -> Self:
        """Set keys of `sharding`."""
        return self.update_config({"sharding": sharding})

    def set_platform(self, **platform: Any) -> Self:
        """Set keys of `platform`."""
        return self.update_config({"platform": platform})

    def set_base_config(self, **values: Any) -> Self:
        """Override values of the model's configuration."""
        return self.update_config({"base_config": {"values": values}})

    def set_operation_configs(
        self, configs: Mapping[str, Mapping[str, Any]] | None = None, **values: Any
    ) -> Self:
        """Set kernel settings by operation; execution fields such as `attn_mechanism` go along.

        Args:
            configs: operation -> settings, such as `{"flash_attn2": {"block_q": 128}}`.
            values: operations with their settings, or execution fields with their values.
        """
        operations = {**(configs or {})}
        fields = {}
        for name, value in values.items():
            (fields if canonical_field(name) in FIELDS else operations)[name] = value
        return self.update_config(
            {"base_config": {"values": fields, "operation_configs": operations}}
        )

    def set_mixture(self, **mixture: Any) -> Self:
        """Set keys of `mixture`."""
        return self.update_config({"mixture": mixture})

    def add_dataset(
        self,
        data_files: Any = None,
        dataset_type: str | None = None,
        content_field: str | None = None,
        split: str | None = None,
        *,
        dataset_name: str | None = None,
        max_length: int | None = None,
        held_out: bool = False,
        **inform: Any,
    ) -> Self:
        """Add a source of texts to the mixture.

        Args:
            data_files: files, globs, or what `dataset_type` reads.
            dataset_type: `json`, `parquet`, `csv`, `txt`, `huggingface`, `python`, …
            content_field: the field that holds the text.
            split: which split of it.
            dataset_name: id of a Hugging Face dataset, instead of `data_files`.
            max_length: tokens at which each text of the mixture is cut.
            held_out: read for evaluation only.
            inform: further keys of an inform.
        """
        if dataset_name is not None:
            data_files, dataset_type = dataset_name, "huggingface"
        given = {
            "type": dataset_type,
            "data_files": data_files,
            "content_field": content_field,
            "dataset_split_name" if dataset_name is not None else "split": split,
            **inform,
        }
        given = {key: value for key, value in given.items() if value is not None}
        key = "eval_informs" if held_out else "informs"
        before = ((self._document.value or {}).get("mixture") or {}).get(key) or ()
        mixture: dict[str, Any] = {key: [*before, given]}
        if max_length is not None:
            mixture["tokenization"] = {"max_length": max_length}
        return self.update_config({"mixture": mixture})

    def set_trainer(self, trainer_type: str | None = None, **trainer: Any) -> Self:
        """Set the method and keys of `trainer`."""
        if trainer_type is not None:
            trainer["trainer_type"] = trainer_type
        return self.update_config({"trainer": trainer})

    def set_esurge(self, **esurge: Any) -> Self:
        """Set keys of `esurge`."""
        return self.update_config({"esurge": esurge})

    def set_eval(self, **options: Any) -> Self:
        """Set keys of `eval`."""
        return self.update_config({"eval": options})

    # Building; each part is built once.

    def build_tokenizer(self) -> Any:
        """The tokenizer, loaded or trained."""
        return self._once("tokenizer", lambda: build.tokenizer(self.config))

    def build_model(self) -> Any:
        """The model on its devices."""
        return self._once("model", lambda: build.model(self.config, self.build_tokenizer()))

    def build_dataset(self) -> Any:
        """The loader of training batches."""
        return self._loaders()[0]

    def build_eval_dataset(self) -> Any:
        """The loader of held-out batches, or None where nothing is held out."""
        return self._loaders()[1]

    def build_training_arguments(self) -> Any:
        """The arguments of the trainer, derived values included."""
        if self.config.trainer is None:
            raise self.config.origin.blame((), "the section 'trainer' is missing", on_key=True)
        return self.config.trainer

    def build_trainer(self) -> Any:
        """The trainer with model, tokenizer and data."""
        self.build_training_arguments()
        train, held_out = self._loaders()
        model, tokenizer = self.build_model(), self.build_tokenizer()
        return self._once(
            "trainer", lambda: build.trainer(self.config, model, tokenizer, train, held_out)
        )

    def build_esurge(self) -> eSurge:
        """The serving engine around the model."""
        model, tokenizer = self.build_model(), self.build_tokenizer()
        return self._once("engine", lambda: build.engine(self.config, model, tokenizer))

    def held_out_texts(self) -> list[str]:
        """The texts that training does not see."""
        return self._once("held_out", lambda: build.held_out_texts(self.config))

    def clear_cache(self) -> Self:
        """Let go of everything that was built; the configuration stays."""
        for loader in self._built.get("loaders") or ():
            if loader is not None:
                loader.close()
        self._built.clear()
        return self

    def _loaders(self) -> tuple[Any, Any]:
        tokenizer = self.build_tokenizer()
        return self._once("loaders", lambda: build.loaders(self.config, tokenizer))

    def _once(self, name: str, make: Any) -> Any:
        if name not in self._built:
            self._built[name] = make()
        return self._built[name]

    # Doing.

    def train(self) -> TrainerOutput:
        """Train; goes on from the newest checkpoint of the run, if there is one."""
        trainer = self.build_trainer()
        self._built.pop("engine", None)  # it holds the untrained weights
        with build.blame(self.config, "trainer", "save_directory"):
            return trainer.train()

    def prepare_eval(self, options: EvalOptions) -> Any:
        """Find the tasks of an evaluation and load their data; `eval` then uses them.

        Raises:
            ConfigError: a task does not exist, or its data cannot be had.
        """
        from ed_elarge import evaluation
        from ed_elarge.local_tasks import NAMES

        merged = options.over(self.config.eval)
        texts = self.held_out_texts() if {*merged.tasks} & {*NAMES} else []
        directory = build.directory(self.config) / "eval" / "tasks"
        key = f"tasks {merged.model_dump_json()}"
        return self._once(key, lambda: evaluation.Tasks(merged, texts, directory))

    def eval(
        self,
        tasks: Sequence[str] | str | None = None,
        *,
        engine: str = "auto",
        **options: Any,
    ) -> dict[str, Any]:
        """Evaluate with lm-evaluation-harness over eSurge.

        Args:
            tasks: task names; default: those of the `eval` section.
            engine: `esurge`, or `auto`, which takes it.
            options: keys of the `eval` section, for this time.

        Returns:
            lm-eval's results.

        Raises:
            InputError: an option is unknown or wrong.
            ConfigError: a task does not exist, or its data cannot be had.
        """
        given: dict[str, Any] = {"engine": engine, **options}
        if tasks is not None:
            given["tasks"] = [tasks] if isinstance(tasks, str) else list(tasks)
        return self.run_eval(_checked(EvalOptions, given))

    def run_eval(self, options: EvalOptions) -> dict[str, Any]:
        """`eval` with checked options; see there."""
        from ed_elarge import evaluation

        prepared = self.prepare_eval(options)
        results = evaluation.run(self.build_esurge(), prepared)
        evaluation.write(results, self.results_path(options))
        return results

    def results_path(self, options: EvalOptions) -> Path:
        """Where the results of an evaluation go."""
        path = options.over(self.config.eval).output_path
        return Path(path) if path else build.directory(self.config) / "eval" / "results.json"

    def generate(
        self, prompts: Sequence[str] | str | None = None, **options: Any
    ) -> list[tuple[str, str]]:
        """Complete prompts with the engine: `[(prompt, completion), ...]`.

        Args:
            prompts: texts; default: the beginning of a held-out text.
            options: keys of the `generate` action.
        """
        given = options if prompts is None else {**options, "prompts": prompts}
        return inference.complete(self, _checked(GenerateOptions, given))

    def serve(self, **options: Any) -> None:
        """Serve the OpenAI-compatible API until interrupted; options: of the `serve` action."""
        inference.serve(self, _checked(ServeOptions, options))


def _checked(cls: type, given: dict[str, Any]) -> Any:
    value, problems = validate(cls, given, ())
    if problems:
        raise InputError("options", problems)
    return value


def _check(name: str, section: Any) -> list[Any]:
    """What is wrong with a section as far as it is given; missing keys may still come."""
    if name == "actions":
        return []
    if name not in (*SECTIONS, "trainer"):
        return [Problem((name,), normalize.unknown_section(name), on_key=True)]
    return normalize.section(name, section, (name,), partial=True)[1]


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(old)
    for key, value in new.items():
        before = out.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        out[key] = _merged(before, value) if both else value  # pyright: ignore[reportArgumentType]
    return out


def _write(path: str | Path, text: str) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
