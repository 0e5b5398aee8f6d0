"""Execution of the actions of a run in order. `ed_elarge.config.table` lists the actions."""

from __future__ import annotations

import logging
import os
import pkgutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ed_data.schema import TEXT
from ed_esurge.command.program import Result, is_quiet, show_result
from ed_infra import freed_memory
from ed_infra.compilation.cache import keep_compiled_programs
from ed_infra.enums import TaskType
from ed_infra.logging import show_messages

from ed_elarge.actions import provenance
from ed_elarge.actions.summary import Summary
from ed_elarge.building.parts import look_ahead
from ed_elarge.config.action_options import (
    EvalOptions,
    GenerateOptions,
    NoOptions,
    ServeOptions,
    WriteOptions,
)
from ed_elarge.config.description import describe_run_file, describe_training
from ed_elarge.config.run_config import RunConfig
from ed_elarge.config.table import ACTIONS, check_machine
from ed_elarge.exits import INTERRUPTED, stopped_exit_code
from ed_elarge.model import eLargeModel

if TYPE_CHECKING:
    from ed_data.batches.loader import Loader, StreamLoader
    from ed_trainers.callbacks import Callback


#: Held-out recordings that are transcribed for the summary without `predict_with_generate`.
MOST_TRANSCRIPTS = 32


@dataclass
class Session:
    """State of one run.

    Attributes:
        elm: The model.
        summary: The results of the actions.
        stopped: The signal that stopped the run, or None.
        trains_later: Whether a later action trains the model, so that the results of the present
            action are those before training.
    """

    elm: eLargeModel
    summary: Summary = field(default_factory=Summary)
    stopped: str | None = None
    trains_later: bool = False


def execute(
    run: RunConfig,
    *,
    verbose: bool = False,
    until: int | None = None,
    watchers: Sequence[Callback] = (),
) -> Result:
    """Execute the actions of a run and return their results.

    Args:
        run: The run.
        verbose: Whether to log more.
        until: Number of updates after which training stops with a checkpoint; None: all.
        watchers: Callbacks of the trainer.

    Raises:
        InputError: The input is invalid. No action was started, or the trained model is kept and
            standard error names its location.
    """
    if is_quiet() or not sys.stderr.isatty():
        # tqdm reads the variable at import; lm-eval and datasets draw progress bars into files
        os.environ.setdefault("TQDM_DISABLE", "1")
    show_messages(logging.INFO if verbose else logging.WARNING)
    session = Session(eLargeModel.from_run(run))
    session.elm.last_step, session.elm.watchers = until, tuple(watchers)
    check_machine(run)
    stopped_code = stopped_exit_code()
    prepared = False
    for number, action in enumerate(run.actions):
        if ACTIONS[action.name].prepare and not prepared:
            if run.will("train"):
                print(describe_training(run), flush=True)
            _prepare(session.elm)
            prepared = True
        session.trains_later = any(later.name == "train" for later in run.actions[number + 1 :])
        try:
            with run.blame_at(action.path):
                pkgutil.resolve_name(ACTIONS[action.name].function)(session, action.options)
        except BaseException:
            session.summary.print_location_of_model()
            raise
        if session.stopped is not None:
            skipped = ", ".join(action.name for action in run.actions[number + 1 :])
            if skipped:
                print(f"skipped: {skipped}", file=sys.stderr)
            code = INTERRUPTED if session.stopped == "SIGINT" else stopped_code
            return Result(session.summary.to_dict(), code)
    session.summary.show()
    return Result(session.summary.to_dict())


def _prepare(elm: eLargeModel) -> None:
    """Prepare all actions before the first one starts, so that errors appear early."""
    from ed_infra import distributed

    keep_compiled_programs()
    distributed.initialize()
    run = elm.config
    # The engine of the other runs prepares a step while the device computes the one before.
    if run.will("train") and not run.will("serve") and not run.method_entry.samples:
        freed_memory.compute_in_calling_thread()
    if run.will("train"):
        elm.set_watchers(*elm.watchers, provenance.create_recorder(run))
    for action in run.actions:
        prepare = ACTIONS[action.name].prepare
        if prepare:
            with run.blame_at(action.path):
                pkgutil.resolve_name(prepare)(elm, action.options)


# Preparation.


def prepare_train(elm: eLargeModel, options: NoOptions) -> None:
    """Build model, data and trainer."""
    look_ahead(elm.config)
    elm.build_trainer()


def prepare_eval(elm: eLargeModel, options: EvalOptions) -> None:
    """Find the tasks and load their data."""
    elm.prepare_eval(options)


def prepare_model(elm: eLargeModel, options: GenerateOptions | ServeOptions) -> None:
    """Load the model, unless separate processes load it."""
    if getattr(options, "data_parallel_size", 1) == 1:
        elm.build_model()


# Actions.


def validate_session(session: Session, options: NoOptions) -> None:
    """Report success: every run is validated before its first action."""
    show_result("the configuration is valid")


def show_session(session: Session, options: NoOptions) -> None:
    """Print a summary of the configuration."""
    show_result(describe_run_file(session.elm.config))


def dump_config(session: Session, options: NoOptions) -> None:
    """Print the configuration."""
    show_result(session.elm.config.to_yaml(secrets=False).rstrip("\n"))


def write_json_config(session: Session, options: WriteOptions) -> None:
    """Save the configuration as JSON."""
    session.elm.to_json(options.path)
    print(f"saved the configuration to {options.path}")


def to_yaml(session: Session, options: WriteOptions) -> None:
    """Save the configuration as YAML."""
    session.elm.to_yaml(options.path)
    print(f"saved the configuration to {options.path}")


def train_session(session: Session, options: NoOptions) -> None:
    """Train the model and evaluate it on held-out text."""
    from ed_elarge.evaluation import heldout_metrics

    elm, summary = session.elm, session.summary
    output = elm.train()
    summary.record_training(output, elm.config)
    session.stopped = output.stopped_by
    if session.stopped is not None:
        return
    if output.trained_steps == 0:
        steps = int(output.metrics["steps"])
        print(f"the training had already finished ({steps} steps)")
    held_out = elm.build_eval_dataset()
    if held_out is not None and elm.config.schema == TEXT and elm.config.task == TaskType.CAUSAL_LM:
        batches = _with_progress(held_out, "evaluating on held-out text")
        summary.heldout = heldout_metrics.measure_heldout(
            elm.part("model"), batches, elm.build_tokenizer()
        )

    if held_out is not None and _needs_error_rates(elm.config, summary.metrics):
        summary.metrics |= _measure_transcripts(elm, held_out)


def _needs_error_rates(run: RunConfig, metrics: Mapping[str, float]) -> bool:
    """Return whether the model transcribes, and the last evaluation has no word error rate."""
    is_refused = run.trainer is not None and "predict_with_generate" in run.trainer.model_fields_set
    speaks = run.task == TaskType.SPEECH_SEQUENCE_TO_SEQUENCE
    return speaks and "eval_wer" not in metrics and not is_refused


def _measure_transcripts(elm: eLargeModel, held_out: Loader | StreamLoader) -> dict[str, float]:
    """Return the error rates of the first held-out recordings."""
    from ed_trainers.methods.transcripts import count_errors

    from ed_elarge.building.engines import speech_processor

    batches = _with_progress(held_out, "transcribing held-out recordings")
    rates = count_errors(
        elm.part("model"), batches, speech_processor(elm), limit=MOST_TRANSCRIPTS
    ).rates()
    return {f"eval_{name}": rate for name, rate in rates.items()}


def _with_progress(loader: Loader | StreamLoader, description: str) -> Iterable[Any]:
    """Yield the batches of a loader, with a progress bar on a terminal."""
    from rich.progress import track

    hidden = not sys.stdout.isatty()
    return track(
        loader,
        description=description,
        total=loader.steps_per_epoch,
        transient=True,
        disable=hidden,
    )


def evaluate_session(session: Session, options: EvalOptions) -> None:
    """Evaluate with lm-evaluation-harness, or on local tasks.

    An evaluation before training writes its results to a file of its own.
    """
    from ed_elarge.evaluation.harness import add_plain_names
    from ed_elarge.evaluation.local import LocalTasks

    elm, summary, early = session.elm, session.summary, session.trains_later
    tasks = elm.prepare_eval(options)  # cached
    file = tasks.results
    if file is not None and early:
        file = file.with_stem(f"{file.stem}_before_training")
    results = add_plain_names(tasks.run(elm.build_esurge(), file))
    if file is not None:
        provenance.write_beside(elm.config, file)
    summary.record_evaluation(results, file, trains_later=early)
    if isinstance(tasks, LocalTasks):
        for sample in tasks.list_shown_samples():
            summary.record_sample(
                sample["prompt"],
                sample["answer"],
                expected=sample["expected"],
                trains_later=early,
            )
    if tasks.options.print_results:
        summary.print_evaluation(results, trains_later=early)


def generate_session(session: Session, options: GenerateOptions) -> None:
    """Print completions."""
    completions = session.elm.generate(**options.model_dump(exclude_unset=True))
    for prompt, completion in completions:
        session.summary.record_sample(prompt, completion, trains_later=session.trains_later)
        if isinstance(prompt, str):
            show_result(f"--- {prompt!r} continues:\n{completion}\n---")
        else:
            turns = "\n".join(f"{m['role']}: {m.get('content')}" for m in prompt)
            show_result(f"--- {turns}\nassistant: {completion}\n---")


def serve_session(session: Session, options: ServeOptions) -> None:
    """Print the summary of the earlier actions, and serve.

    With `--json`, a run that only serves prints its object when the server accepts requests.
    """
    from ed_esurge.command.serve import lower_log_level, show_address
    from ed_esurge.server.launch import ready_line

    session.summary.show()
    if not is_quiet():
        show_messages(logging.INFO)  # the engine states its sizes

    def announce(url: str, names: Sequence[str]) -> None:
        if len(session.elm.config.actions) == 1:
            show_address(url, names)
        else:
            show_result(ready_line(url))

    values = lower_log_level(options).model_dump(exclude_unset=True)
    session.elm.serve(announce, **values)
