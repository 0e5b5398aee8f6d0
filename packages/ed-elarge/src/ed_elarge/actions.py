"""What each action does. The table of names and parameters is in `ed_elarge.action_options`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ed_elarge import build, describe
from ed_elarge.action_options import Action
from ed_elarge.model import eLargeModel
from ed_elarge.summary import Summary


@dataclass
class Session:
    """One run of a file: the object that is acted on, and what there is to tell at the end."""

    elm: eLargeModel
    summary: Summary = field(default_factory=Summary)
    stopped: str | None = None


def perform(session: Session, action: Action) -> None:
    """Do one action."""
    _TABLE[action.name](session, action.options)


def _validate(session: Session, options: Any) -> None:
    session.elm.validate()
    print("the configuration is valid")


def _print(session: Session, options: Any) -> None:
    print(describe.describe(session.elm.config))


def _dump_config(session: Session, options: Any) -> None:
    print(describe.to_yaml(session.elm.config), end="")


def _to_json(session: Session, options: Any) -> None:
    session.elm.to_json(options.path)
    print(f"saved the configuration to {options.path}")


def _to_yaml(session: Session, options: Any) -> None:
    session.elm.to_yaml(options.path)
    print(f"saved the configuration to {options.path}")


def _train(session: Session, options: Any) -> None:
    from ed_elarge import learned

    elm, summary = session.elm, session.summary
    directory = build.directory(elm.config)
    before = _newest_step(directory)
    output = elm.train()
    summary.trained(output, directory)
    session.stopped = output.stopped_by
    if session.stopped is not None:
        return
    if before is not None and before == output.metrics["steps"]:
        print(f"the training was finished before ({before} steps): nothing was left to train")
    held_out = elm.build_eval_dataset()
    if held_out is not None:
        batches = _with_progress(held_out, "measuring what was learned")
        summary.learned = learned.measure(elm.build_model(), batches, elm.build_tokenizer())


def _with_progress(loader: Any, what: str) -> Iterable[Any]:
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


def _eval(session: Session, options: Any) -> None:
    results = session.elm.run_eval(options)
    path = session.elm.results_path(options)
    session.summary.evaluated(results, path)
    if options.over(session.elm.config.eval).print_results:
        session.summary.print_evaluation(results)


def _generate(session: Session, options: Any) -> None:
    from ed_elarge import inference

    completions = inference.complete(session.elm, options)
    session.summary.samples.extend(completions)
    for prompt, completion in completions:
        print(f"--- {prompt!r} continues:\n{completion}\n---")


def _serve(session: Session, options: Any) -> None:
    from ed_elarge import inference

    session.summary.show()
    inference.serve(session.elm, options)


_TABLE: dict[str, Callable[[Session, Any], None]] = {
    "validate": _validate,
    "print": _print,
    "dump_config": _dump_config,
    "to_json": _to_json,
    "to_yaml": _to_yaml,
    "train": _train,
    "eval": _eval,
    "generate": _generate,
    "serve": _serve,
}
