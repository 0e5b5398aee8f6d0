"""Doing the actions of a run, one after the other. What there is to do is in `ed_elarge.table`."""

from __future__ import annotations

import logging
import os
import pkgutil
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ed_elarge.build import Parts, look_ahead
from ed_elarge.describe import describe
from ed_elarge.run_config import RunConfig
from ed_elarge.sections import (
    EvalOptions,
    GenerateOptions,
    NoOptions,
    ServeOptions,
    WriteOptions,
)
from ed_elarge.summary import Summary
from ed_elarge.table import ACTIONS, look

if TYPE_CHECKING:
    from ed_data.loader import Loader
    from ed_trainers.trainer import TrainerOutput

    from ed_elarge.evaluation import Tasks

#: Exit codes of a run that a signal ended; as of the shell.
_BY_SIGNAL = {"SIGINT": 130, "SIGTERM": 143}
PROMPT_WORDS = 12


@dataclass
class Session:
    """One run of a file: what is built, what there is to tell at the end, what stopped it."""

    parts: Parts
    summary: Summary = field(default_factory=Summary)
    stopped: str | None = None


def execute(run: RunConfig, *, verbose: bool = False) -> int:
    """Do what the file says; returns the exit code.

    Raises:
        InputError: something is wrong with the input; nothing was begun, or what was trained until
            then is kept, and standard error says where.
    """
    if not sys.stderr.isatty():
        # tqdm reads it when it is imported; lm-eval and datasets draw bars whatever they write to
        os.environ.setdefault("TQDM_DISABLE", "1")
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s")
    session = Session(Parts(run))
    look(run)
    prepared = False
    for number, action in enumerate(run.actions):
        if ACTIONS[action.name].prepares and not prepared:
            _prepare(session.parts)
            prepared = True
        try:
            with run.blame_at(action.path):
                pkgutil.resolve_name(ACTIONS[action.name].does)(session, action.options)
        except BaseException:
            session.summary.say_what_is_kept()
            raise
        if session.stopped is not None:
            skipped = ", ".join(action.name for action in run.actions[number + 1 :])
            if skipped:
                print(f"not done: {skipped}", file=sys.stderr)
            return _BY_SIGNAL.get(session.stopped, 0)
    session.summary.show()
    return 0


def _prepare(parts: Parts) -> None:
    """Find out whether the actions can be done, before the first of them begins."""
    from ed_infra import distributed

    keep_compiled_programs()
    distributed.initialize()
    for action in parts.run.actions:
        prepare = ACTIONS[action.name].prepares
        if prepare:
            with parts.run.blame_at(action.path):
                pkgutil.resolve_name(prepare)(parts, action.options)


def keep_compiled_programs() -> None:
    """Point jax's persistent compilation cache at the user's cache folder.

    A second start, and serving, then need not compile again. Only a run does this, never an import.
    What the user has set himself stands: `JAX_COMPILATION_CACHE_DIR`, or
    `JAX_ENABLE_COMPILATION_CACHE=false` for none.
    """
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(home) / "easydel" / "jax"))


# The configuration.


def validate(session: Session, options: NoOptions) -> None:
    """`validate`: what a run begins with anyway."""
    print("the configuration is valid")


def show(session: Session, options: NoOptions) -> None:
    """`print`."""
    print(describe(session.parts.run))


def dump_config(session: Session, options: NoOptions) -> None:
    """`dump_config`."""
    print(session.parts.run.to_yaml(), end="")


def to_json(session: Session, options: WriteOptions) -> None:
    """`to_json`."""
    write(options.path, session.parts.run.to_json())
    print(f"saved the configuration to {options.path}")


def to_yaml(session: Session, options: WriteOptions) -> None:
    """`to_yaml`."""
    write(options.path, session.parts.run.to_yaml())
    print(f"saved the configuration to {options.path}")


def write(path: str | Path, text: str) -> None:
    """Write a text file, and the folders above it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


# Training.


def prepare_train(parts: Parts, options: NoOptions) -> None:
    """Build model, data and trainer."""
    look_ahead(parts.run)
    _ = parts.trainer


def train(session: Session, options: NoOptions) -> None:
    """`train`: train, and measure on held-out text what was learned."""
    from ed_elarge import learned

    parts, summary = session.parts, session.summary
    directory = parts.run.directory
    before = _newest_step(directory)
    output = run_training(parts)
    summary.trained(output, directory)
    session.stopped = output.stopped_by
    if session.stopped is not None:
        return
    if before is not None and before == output.metrics["steps"]:
        print(f"the training was finished before ({before} steps): nothing was left to train")
    _, held_out = parts.loaders
    if held_out is not None:
        batches = _with_progress(held_out, "measuring what was learned")
        summary.learned = learned.measure(parts.model, batches, parts.tokenizer)


def run_training(parts: Parts) -> TrainerOutput:
    """Train; goes on from the newest checkpoint of the run, if there is one."""
    trainer = parts.trainer
    parts.forget("engine")  # it holds the untrained weights
    with parts.run.blame("trainer", "save_directory"):
        return trainer.train()


def _with_progress(loader: Loader, what: str) -> Iterable[Any]:
    """The batches of a loader under a progress bar, where there is a terminal."""
    from rich.progress import track

    hidden = not sys.stdout.isatty()
    return track(
        loader, description=what, total=loader.steps_per_epoch, transient=True, disable=hidden
    )


def _newest_step(directory: Path) -> int | None:
    """The step of the newest checkpoint, by the names of the folders."""
    names = [p.name for p in (directory / "checkpoints").glob("*") if p.name.isdigit()]
    return max(map(int, names), default=None)


# Evaluation.


def prepare_evaluate(parts: Parts, options: EvalOptions) -> Tasks:
    """Find the tasks of an evaluation and load their data.

    Raises:
        ConfigError: a task does not exist, or its data cannot be had.
    """
    from ed_elarge import evaluation, local_tasks

    run = parts.run
    merged = options.over(run.eval)
    texts = parts.held_out_texts if {*merged.tasks} & {*local_tasks.NAMES} else []
    directory = run.directory / "eval" / "tasks"
    key = f"tasks {merged.model_dump_json()}"
    return parts.once(key, lambda: evaluation.Tasks(merged, texts, directory))


def run_evaluation(parts: Parts, options: EvalOptions) -> tuple[dict[str, Any], Path]:
    """Evaluate: lm-eval's results, and the file in which they are kept."""
    from ed_elarge import evaluation

    tasks = prepare_evaluate(parts, options)
    results = evaluation.run(parts.engine, tasks)
    path = tasks.options.output_path or parts.run.directory / "eval" / "results.json"
    evaluation.write(results, Path(path))
    return results, Path(path)


def evaluate(session: Session, options: EvalOptions) -> None:
    """`eval`."""
    results, path = run_evaluation(session.parts, options)
    session.summary.evaluated(results, path)
    if options.over(session.parts.run.eval).print_results:
        session.summary.print_evaluation(results)


# Completions.


def prepare_model(parts: Parts, options: GenerateOptions | ServeOptions) -> None:
    """Load the model."""
    _ = parts.model


def generate(session: Session, options: GenerateOptions) -> None:
    """`generate`."""
    completions = complete(session.parts, options)
    session.summary.samples.extend(completions)
    for prompt, completion in completions:
        print(f"--- {prompt!r} continues:\n{completion}\n---")


def complete(parts: Parts, options: GenerateOptions) -> list[tuple[str, str]]:
    """Complete each prompt: `[(prompt, completion), ...]`."""
    from ed_esurge.sampling import SamplingParams

    prompts = options.prompts or default_prompt(parts)
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    params = SamplingParams(
        max_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
    )
    outputs = parts.engine.generate(prompts, params)
    return [(p, out.outputs[0].text) for p, out in zip(prompts, outputs, strict=True)]


def default_prompt(parts: Parts) -> str:
    """The first words of the longest held-out text, so that the model has not seen them."""
    texts = parts.held_out_texts if parts.run.has_held_out else []
    longest = max(texts, key=len, default="The")
    words = [match.end() for match in re.finditer(r"\S+", longest)]
    return longest[: words[min(len(words), PROMPT_WORDS) - 1]]


def serve(session: Session, options: ServeOptions) -> None:
    """`serve`, after the summary of what was done before."""
    session.summary.show()
    run_server(session.parts, options)


def run_server(parts: Parts, options: ServeOptions) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    from ed_esurge.server import serve

    serve(
        parts.engine,
        options.host,
        options.port,
        served_model_name=options.served_model_name or _model_name(parts.run),
        api_key=options.api_key,
        cors_origins=options.cors_origins,
        log_level=options.log_level,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
    )


def _model_name(run: RunConfig) -> str:
    """What clients call the model unless told otherwise."""
    if run.model is not None and run.model.name_or_path is not None:
        return Path(run.model.name_or_path).name
    return run.directory.name or "model"
