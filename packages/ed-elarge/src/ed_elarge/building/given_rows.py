"""Rows that Python code gives to a trainer or to `eLargeModel.train`, prepared as a run file does.

The rows become the source of a mixture of type `python`, and the run file's builders tokenize,
mix and pack them. `ed_trainers` calls `prepare_rows` by the entry point group `easydel.rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ed_data.sources.python import GivenRows, keep_while, list_frame_rows
from ed_infra.errors import ConfigError
from ed_trainers.arguments import METHODS, TrainingArguments

from ed_elarge.building.tools import name_function
from ed_elarge.config.normalize import normalize
from ed_elarge.errors import Document
from ed_elarge.model import eLargeModel

if TYPE_CHECKING:
    from ed_models.protocol import LanguageModel
    from ed_trainers.given import PreparedRows

#: Place of the model in a run whose model is an object.
GIVEN_MODEL = "the given model"


def describe_rows(rows: object, name: str) -> tuple[dict[str, object], GivenRows]:
    """Return the inform of rows, and the rows, which are released with the second object.

    The field of plain texts is `content`, or `text` if the first row has no `content`. A prompt
    with a completion is no plain text.

    Args:
        rows: A list of texts or rows, a `datasets.Dataset` or `IterableDataset`, a frame of pandas
            or polars, or an arrow table.
        name: Name of the inform.
    """
    rows = list_frame_rows(rows)
    given = GivenRows(rows)
    inform: dict[str, object] = {"type": "python", "data_files": given.address, "name": name}
    first = next(iter(rows), None) if isinstance(rows, Iterable) else None
    if isinstance(first, Mapping) and "content" not in first:
        for field in ("text", "prompt"):
            if field in first and not (field == "prompt" and "completion" in first):
                inform["content_field"] = field
                break
    return inform, given


def choose_streaming(
    datasets: Iterable[object], written: Mapping[str, object]
) -> dict[str, object]:
    """Return the key `streaming` for a mixture with rows of unknown number.

    Args:
        datasets: rows of Python; None is no data set.
        written: the keys of the mixture; a written `streaming` is not changed.
    """
    streams = not all(hasattr(rows, "__len__") for rows in datasets if rows is not None)
    return {"streaming": True} if streams and "streaming" not in written else {}


def build_mixture(
    train: object, evaluation: object, written: Mapping[str, object]
) -> tuple[dict[str, object], tuple[GivenRows, ...]]:
    """Return the section `mixture` with rows as its sources, and the rows.

    Args:
        train: rows for training.
        evaluation: rows for evaluation, or None.
        written: further keys of the section.
    """
    informs, all_rows = {}, []
    for key, name, rows in (
        ("informs", "train_dataset", train),
        ("eval_informs", "eval_dataset", evaluation),
    ):
        if rows is not None:
            inform, given = describe_rows(rows, name)
            informs[key] = [inform]
            all_rows.append(given)
    more = choose_streaming((train, evaluation), written)
    return {**written, **more, **informs}, tuple(all_rows)


def prepare_rows(
    arguments: TrainingArguments,
    model: LanguageModel,
    processing_class: object,
    train: object,
    evaluation: object,
    tools: Sequence[Callable[..., object]] = (),
) -> PreparedRows:
    """Return the batches of rows, and the rollout and the tools of a method that samples.

    Args:
        arguments: options of the method; they may contain keys of EasyDeL about the data.
        model: the trained model.
        processing_class: the tokenizer, or the processor of a model of images or recordings.
        train: rows for training; None with rows for evaluation only.
        evaluation: rows for evaluation, or None.
        tools: functions that the model may call.

    Raises:
        ConfigError: the method has no run file, or a value is invalid.
    """
    from ed_trainers.given import PreparedRows  # imports jax

    methods = [name for name, entry in METHODS.items() if entry.arguments is type(arguments)]
    if not methods:
        raise ConfigError(f"no method has the options {type(arguments).__name__}: pass batches")
    values = {name: getattr(arguments, name) for name in arguments.model_fields_set}
    if tools:  # the functions themselves are given to the run
        values["tools"] = [name_function(tool) for tool in tools]
    mixture, given = build_mixture(
        evaluation if train is None else train, None if train is None else evaluation, {}
    )
    task = getattr(model, "model_task", None)
    roles = METHODS[methods[0]].needs  # the trainer has these models
    document = Document(
        "the arguments of the trainer",
        value={
            "model": {"name_or_path": GIVEN_MODEL} | ({"task": str(task.value)} if task else {}),
            "trainer": {**values, **arguments.data_keys, "trainer_type": methods[0]},
            "mixture": mixture,
            **{f"{role}_model": {"name_or_path": GIVEN_MODEL} for role in roles},
        },
    )
    run = normalize(document)
    elm = eLargeModel.from_run(run)
    elm.give(model=model)
    elm.given_config, elm.tools = model.config, tuple(tools)
    if run.has_processor:
        elm.give(processor=processing_class, tokenizer=getattr(processing_class, "tokenizer", None))
    else:
        elm.give(tokenizer=processing_class)
    with run.blame("trainer"):
        loader, held_out = elm.part("loaders")
        samples = run.method_entry.samples
        rollout, tool_set = (elm.part("rollout"), elm.part("tools")) if samples else (None, None)
    for built in (loader, held_out):
        if built is not None:
            keep_while(built, given)
    batches = (None, loader) if train is None else (loader, held_out)
    return PreparedRows(*batches, rollout, tool_set)


def give_data(elm: eLargeModel, train: object, evaluation: object) -> eLargeModel:
    """Return the same model with rows as the sources of its mixture.

    Args:
        elm: A model with the section `trainer`; its built parts are shared, except those of data.
        train: Rows that replace `informs`, or None.
        evaluation: Rows that replace `eval_informs`, or None.
    """
    written = elm.to_sections()
    mixture, given = build_mixture(train, evaluation, written.get("mixture") or {})
    other = eLargeModel({**written, "mixture": mixture})
    shared = ("model", "tokenizer", "processor", "reference", "teacher", "reward")
    other.give(**{name: elm.part(name) for name in shared if elm.has_built(name)})
    other.watchers, other.given_rows = elm.watchers, (*elm.given_rows, *given)
    return other
