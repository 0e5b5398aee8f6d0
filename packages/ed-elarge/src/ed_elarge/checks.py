"""Checks that need more than one section, and the values that follow from other sections.

- Batch size: `trainer.total_batch_size` and `mixture.batch_size` are one number, the sequences of
  an optimizer step; either may be left out.
- Length of a sequence: `mixture.pack_seq_length` when packing, else `trainer.max_length`, else
  `mixture.tokenization.max_length`.
- Seeds: `mixture.seed` orders the data and falls back to `trainer.seed`, everything else's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ed_infra.errors import ConfigError, did_you_mean
from ed_infra.fields import FIELD_ALIASES, FIELDS, canonical_field
from ed_infra.fields import normalize as normalize_field

from ed_elarge import architectures, local_tasks
from ed_elarge.errors import KeyPath, Problem
from ed_elarge.sections import TrainedTokenizer

if TYPE_CHECKING:
    from ed_elarge.normalize import Run


class Checker:
    """Look at a run as a whole.

    Args:
        run: sections that validated, None where one did not (its own errors are known already).
        given: the sections as the user wrote them, to tell what was given from what is a default.
    """

    def __init__(self, run: Run, given: Mapping[str, Any]) -> None:
        self.run = run
        self.given = given
        self.problems: list[Problem] = []
        self._trainer: dict[str, Any] = {}
        self._mixture: dict[str, Any] = {}
        for check in (
            self._model_config,
            self._base_config,
            self._tokenizer,
            self._batch_sizes,
            self._lengths,
            self._seeds,
            self._action_needs,
            self._tasks,
        ):
            check()

    def resolved(self) -> Run:
        """The run with derived values filled in."""
        trainer, mixture = self.run.trainer, self.run.mixture
        if trainer is not None and self._trainer:
            trainer = trainer.replace(**self._trainer)
        if mixture is not None and self._mixture:
            mixture = replace_fields(mixture, self._mixture)
        return replace(self.run, trainer=trainer, mixture=mixture)

    def _problem(self, path: KeyPath, message: str, *, on_key: bool = False) -> None:
        self.problems.append(Problem((*self.run.origin.prefix, *path), message, on_key))

    # The model.

    def _model_config(self) -> None:
        model = self.run.model
        if model is None or model.config is None:
            return
        ours = {*FIELDS, *FIELD_ALIASES}
        for key, message in architectures.check(model.config, ours).items():
            unknown = key not in model.config or message.startswith("unknown key")
            self._problem(("model", "config", key), message, on_key=unknown)
        self._execution_fields(model.config, ("model", "config"))

    def _base_config(self) -> None:
        section = self.run.base_config
        if section is None:
            return
        self._execution_fields(section.values, ("base_config", "values"))
        known = self._architecture_keys()
        for key, value in section.values.items():
            here = ("base_config", "values", key)
            name = canonical_field(key)
            if name not in FIELDS and key not in known:
                hint = did_you_mean(key, [*FIELDS, *FIELD_ALIASES, *known])
                self._problem(here, f"unknown key {key!r}{hint}", on_key=True)
            elif name in _FROM_SECTIONS:
                other, field = _FROM_SECTIONS[name]
                other_value = getattr(getattr(self.run, other), field, None)
                if field in (self.given.get(other) or {}) and _plain(other_value) != _plain(value):
                    self._problem(here, f"differs from {other}.{field}: keep one of them")
        if section.operation_configs:
            here = ("base_config", "operation_configs")
            self._execution_field("operation_configs", section.operation_configs, here)

    def _architecture_keys(self) -> set[str]:
        """Keys that the model's architecture has; of every architecture while it is not known."""
        tables = architectures.tables()
        config = known_config(self.run) or {}
        chosen = tables.get(str(config.get("model_type")))
        keys = set(chosen) if chosen else {key for table in tables.values() for key in table}
        return keys | set(architectures.LEGACY_KEYS) | set(config)

    def _execution_fields(self, values: Mapping[str, Any], path: KeyPath) -> None:
        for key, value in values.items():
            name = canonical_field(key)
            if name in FIELDS:
                self._execution_field(name, value, (*path, key))

    def _execution_field(self, name: str, value: Any, path: KeyPath) -> None:
        try:
            normalize_field(name, value)
        except ConfigError as error:
            self._problem(path, str(error))

    def _tokenizer(self) -> None:
        model, mixture = self.run.model, self.run.mixture
        if model is None:
            return
        if isinstance(model.tokenizer, TrainedTokenizer) and "mixture" not in self.given:
            message = (
                "a tokenizer is trained on the texts of the section 'mixture', which is missing"
            )
            self._problem(("model", "tokenizer", "train"), message, on_key=True)
        other = mixture.tokenization.tokenizer if mixture is not None else None
        if other is not None and other not in (model.tokenizer, model.name_or_path):
            self._problem(
                ("mixture", "tokenization", "tokenizer"),
                f"{other!r} is not the model's tokenizer, and its ids would mean nothing to the "
                "model: leave it out, or set model.tokenizer",
            )

    # Numbers that two sections share.

    def _batch_sizes(self) -> None:
        trainer, mixture = self.run.trainer, self.run.mixture
        if trainer is None or mixture is None:
            return
        of_trainer = given(trainer, "total_batch_size")
        of_mixture = given(mixture, "batch_size")
        if of_trainer is not None and of_mixture is not None and of_trainer != of_mixture:
            self._problem(
                ("trainer", "total_batch_size"),
                f"{of_trainer} differs from mixture.batch_size ({of_mixture}): both are the "
                "sequences of one optimizer step; keep one of them",
            )
        elif of_mixture is None:
            self._mixture["batch_size"] = trainer.total_batch_size

    def _lengths(self) -> None:
        trainer, mixture = self.run.trainer, self.run.mixture
        if mixture is None:
            return
        length, source = sequence_length(trainer, mixture)
        of_trainer = trainer.max_length if trainer is not None else None
        of_texts = mixture.tokenization.max_length
        if length is None:
            if trainer is not None:
                self._problem(
                    ("mixture",),
                    "the length of a sequence is not given: set mixture.pack_seq_length (with "
                    "pack_tokens: true), trainer.max_length or mixture.tokenization.max_length",
                    on_key=True,
                )
            return
        if of_trainer is not None and of_trainer != length:
            self._problem(
                ("trainer", "max_length"),
                f"{of_trainer} differs from {source} ({length}), which sets the length of a "
                "sequence when packing: keep one of them",
            )
        if of_texts is not None and of_texts > length:
            self._problem(
                ("mixture", "tokenization", "max_length"),
                f"{of_texts} is more than {source} ({length}): a text cannot be longer than a "
                "sequence; lower it, or leave it out",
            )
        limit = self._positions()
        if limit is not None and length > limit:
            self._problem(
                tuple(source.split(".")),
                f"{length} is more than the model's max_position_embeddings ({limit})",
            )

    def _positions(self) -> int | None:
        """The model's `max_position_embeddings`, where it can be known."""
        values = self.run.base_config.values if self.run.base_config else {}
        config = {**(known_config(self.run) or {}), **values}
        table = architectures.tables().get(str(config.get("model_type")), {})
        default = table.get("max_position_embeddings", {}).get("default")
        limit = config.get("max_position_embeddings", default)
        return limit if isinstance(limit, int) else None

    def _seeds(self) -> None:
        trainer, mixture = self.run.trainer, self.run.mixture
        if trainer is not None and mixture is not None and given(mixture, "seed") is None:
            self._mixture["seed"] = trainer.seed

    # Actions.

    def _action_needs(self) -> None:
        needs: dict[str, tuple[str, ...]] = {"train": ("trainer", "mixture")}
        for action in self.run.actions:
            for section in ("model", *needs.get(action.name, ())):
                if action.name not in _WITHOUT_MODEL and self.given.get(section) is None:
                    message = f"the action {action.name!r} needs the section {section!r}"
                    self.problems.append(Problem(action.path, message, on_key=True))

    def _tasks(self) -> None:
        section = self.run.eval
        if section is None:
            return
        for action in self.run.actions:
            if action.name != "eval":
                continue
            options = action.options.over(section)
            if not options.tasks:
                message = (
                    f"no tasks are given; those of this package: {', '.join(local_tasks.NAMES)}"
                )
                self.problems.append(Problem(action.path, message, on_key=True))
            self._each_task(options, action.path, bool(action.options.tasks))

    def _each_task(self, options: Any, path: KeyPath, in_action: bool) -> None:
        here = (*path, "tasks") if in_action else (*self.run.origin.prefix, "eval", "tasks")
        for i, task in enumerate(options.tasks):
            if task in local_tasks.NAMES:
                broken = self.run.mixture is None and "mixture" in self.given
                if not broken and not has_held_out(self.run.mixture):
                    message = (
                        f"{task} needs held-out texts: set mixture.eval_fraction or "
                        "mixture.eval_informs"
                    )
                    self.problems.append(Problem((*here, i), message))
            elif not options.include_path and task.startswith("heldout"):
                message = f"unknown task {task!r}{did_you_mean(task, local_tasks.NAMES)}"
                self.problems.append(Problem((*here, i), message))


#: Config field -> the section key that sets it too.
_FROM_SECTIONS: dict[str, tuple[str, str]] = {
    "sharding_axis_dims": ("sharding", "axis_dims"),
    "sharding_axis_names": ("sharding", "axis_names"),
    "sharding_dcn_axis_dims": ("sharding", "dcn_axis_dims"),
    "use_ring_of_experts": ("sharding", "use_ring_of_experts"),
    "fsdp_is_ep_bound": ("sharding", "fsdp_is_ep_bound"),
    "sp_is_ep_bound": ("sharding", "sp_is_ep_bound"),
    "backend": ("platform", "backend"),
    "platform": ("platform", "platform"),
    "operation_configs": ("base_config", "operation_configs"),
}
_WITHOUT_MODEL = ("print", "dump_config", "to_json", "to_yaml")


def known_config(run: Run) -> dict[str, Any] | None:
    """The model's configuration as far as it is known without loading anything."""
    model = run.model
    if model is None:
        return None
    if model.config is not None:
        return model.config
    path = Path(str(model.name_or_path)).expanduser() / "config.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def sequence_length(trainer: Any, mixture: Any) -> tuple[int | None, str]:
    """Tokens of one sequence, and the key that says so (compat decision 10)."""
    packed = mixture.pack_seq_length if mixture.pack_tokens else None
    candidates = (
        (packed, "mixture.pack_seq_length"),
        (trainer.max_length if trainer is not None else None, "trainer.max_length"),
        (mixture.tokenization.max_length, "mixture.tokenization.max_length"),
    )
    return next((c for c in candidates if c[0] is not None), (None, ""))


def has_held_out(mixture: Any) -> bool:
    """Whether the mixture sets texts aside for evaluation."""
    return mixture is not None and bool(mixture.eval_fraction or mixture.eval_informs)


def given(section: Any, name: str) -> Any:
    """The value that the user set, or None where it is a default."""
    return getattr(section, name) if name in section.model_fields_set else None


def replace_fields(section: Any, changes: dict[str, Any]) -> Any:
    """A copy of a section with some fields changed, checked as a whole."""
    values = {name: getattr(section, name) for name in section.model_fields_set}
    return type(section)(**{**values, **changes})


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (tuple, list)) else value
