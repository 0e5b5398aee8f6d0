"""The loop over steps: dispatch, read back one step late, log, evaluate, save, stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import jax
import optax
from ed_infra import freed_memory
from ed_infra.distributed import barrier, from_main
from ed_infra.errors import CheckpointError, ConfigError

from ed_trainers.batches import Cadence, Epochs, Feed
from ed_trainers.checkpoints.checkpoint import Checkpoints
from ed_trainers.checkpoints.memory import MemoryCopies
from ed_trainers.checkpoints.mirror import Mirror
from ed_trainers.checkpoints.run_lock import RunLock
from ed_trainers.checkpoints.run_record import compare_runs, describe_run, move_aside
from ed_trainers.contract import Batch, MethodRun
from ed_trainers.figures.flops import utilization
from ed_trainers.figures.header import format_header
from ed_trainers.figures.meter import Meter, ProfileWindow
from ed_trainers.figures.metrics import RECORD, MetricsLog
from ed_trainers.figures.progress import Progress
from ed_trainers.figures.sinks import build_sinks
from ed_trainers.optimizers import Schedule
from ed_trainers.placement import microbatches, pad_rows
from ed_trainers.probes import Probe
from ed_trainers.rollout import Weights
from ed_trainers.running.evaluation import Best, Evaluator
from ed_trainers.running.stopping import Divergence, StopRequest
from ed_trainers.state import EasyDeLState
from ed_trainers.step import TrainStep, build_train_step
from ed_trainers.stored import disk
from ed_trainers.stored.arrays import count_bytes
from ed_trainers.stored.saved import model_facts

CHECKPOINTS, MODEL = "checkpoints", "model"
Samples = Sequence[Mapping[str, object]]


class Notify(Protocol):
    """A function that calls the callbacks for an event."""

    def __call__(self, event: str, *values: object) -> None:
        """Call the method `event` of every callback with the values."""
        ...


@dataclass(frozen=True)
class Job:
    """The parts of one training run.

    Attributes:
        method: the method with its options, models and placement.
        total_steps: number of updates of the whole run.
        feed: the training batches.
        epochs: the steps at which epochs end.
        evaluator: evaluates the held-out data, if there are any.
        probes: previews and benchmarks, called every few steps.
        schedule: returns the learning rate of an update.
        tx: the optimizer.
        begin: creates the state before training, unless a checkpoint has a later state.
        adopt: accepts a state whose arrays replace those of `begin`.
        save_model: writes the trained model to a directory, and returns the written directory.
        notify: calls the callbacks.
        lock: the lock of the run, which the caller holds.
        settings: values outside of the arguments that determine the result, by key.
        until: number of updates after which the run stops with a checkpoint; None: all.
    """

    method: MethodRun
    total_steps: int
    feed: Feed
    epochs: Epochs
    evaluator: Evaluator | None
    probes: tuple[Probe, ...]
    schedule: Schedule
    tx: optax.GradientTransformation
    begin: Callable[[], EasyDeLState]
    adopt: Callable[[EasyDeLState], None]
    save_model: Callable[[Path], Path]
    notify: Notify
    lock: RunLock
    settings: Mapping[str, Any] | None = None
    until: int | None = None


class TrainingLoop:
    """Runs a job from its first step, or its newest checkpoint, to its end."""

    def __init__(self, job: Job):
        self.job = job
        self.arguments = job.method.arguments
        self.total = job.total_steps
        minutes = self.arguments.save_interval_minutes
        self.stop = StopRequest(
            self.arguments.training_time_limit, None if minutes is None else 60 * minutes
        )
        self.step = self._first_step = 0
        self.progress: Progress | None = None
        directory = Path(self.arguments.save_directory)
        first = jax.process_index() == 0
        if not self.arguments.resume_if_possible and first:
            moved = move_aside(directory)
            if moved is not None:
                print(f"the earlier run in {directory} was moved to {moved}", flush=True)
        self._mirror: Mirror | None = None
        if self.arguments.mirror_address is not None:
            self._mirror = Mirror(self.arguments.mirror_address, RECORD, self._say)
        self._memory: MemoryCopies | None = None
        if self.arguments.memory_directory is not None:
            self._memory = MemoryCopies(Path(self.arguments.memory_directory), self._say)
        self._evaluations, self._saves, self._logs = self._build_cadences()
        self._best = Best(self.arguments)
        keep, best = self.arguments.save_total_limit, self.arguments.save_best_k
        self.checkpoints = Checkpoints(
            directory / CHECKPOINTS,
            keep=1 if keep is None and best is not None else keep,
            keep_best=best or int(self.arguments.load_best_model_at_end),
            score=lambda step: self._best.score(self.log.evaluation(step)),
            say=self._say,
            mirror=self._mirror if first else None,
        )
        if self._mirror is not None:
            # Before the record of the metrics is opened, which is copied too.
            fetch = partial(self._mirror.fetch, self.checkpoints.directory)
            from_main(fetch if self.arguments.resume_if_possible else self._mirror.check_unused)
        sinks = build_sinks(self.arguments, self._say) if first else ()
        self.log = MetricsLog(directory / RECORD, sinks, active=first, say=self._say)
        self.meter = Meter()
        self._profile = ProfileWindow(self.arguments, self._say)
        # Results that are still on the device, and what the feed returns of the batch.
        self._pending: tuple[int, dict[str, jax.Array], Mapping[str, float], Samples] | None = None
        self._leaves: tuple[jax.Array, ...] = ()
        self._unflatten: Callable[[tuple[jax.Array, ...]], EasyDeLState] | None = None
        self._lent: list[Weights] = []
        self._stopped_by: str | None = None
        self._save_asked = False
        self._divergence = Divergence(self.arguments.rolling_interval_length)
        self._compiled: set[object] = set()  # shapes of the batches so far

    def _build_cadences(self) -> tuple[Cadence, Cadence, Cadence]:
        """Return the cadences of evaluations, checkpoints and rows of the metrics."""
        evaluations, saves, logs = (
            Cadence.from_arguments(task, self.arguments, self.total, self.job.epochs)
            for task in ("evaluation", "save", "log")
        )
        share, other = self.arguments.evaluation_steps, self.arguments.save_steps
        compares = self.arguments.save_best_k or self.arguments.load_best_model_at_end
        if compares and evaluations.steps and share and other and share < 1:
            # Every saved step is an evaluated step, in spite of the rounding of both shares.
            saves = replace(saves, steps=evaluations.steps * round(other / share))
        return evaluations, saves, logs

    def run(self) -> dict[str, Any]:
        """Train; return the fields of a `TrainerOutput` other than its directory."""
        began = time.monotonic()
        try:
            with self.stop:
                self._train(self._begin())
                self.checkpoints.wait()
                if self._mirror is not None:
                    self._mirror.wait()
            outcome = self._end()
        finally:
            # Also after an error: a checkpoint that was begun becomes complete.
            freed_memory.give_back()
            self.checkpoints.close()
            if self._mirror is not None:
                self._mirror.wait()
            if self._memory is not None:
                self._memory.close()
            self._profile.stop()
            self.log.close()
            if self.progress is not None:
                self.progress.close()
        outcome["metrics"]["seconds"] = time.monotonic() - began
        return outcome

    def alive_state(self) -> EasyDeLState | None:
        """Return the present state; None before the first step, and where a step that failed took
        the arrays. The next step overwrites it."""
        if self._unflatten is None or any(leaf.is_deleted() for leaf in self._leaves):
            return None
        return self._state()

    @property
    def began(self) -> bool:
        """Whether the state of this run exists yet."""
        return self._unflatten is not None

    def weights(self) -> Weights | None:
        """Return the learner's present weights, which end when the next step begins."""
        state = self.alive_state()
        if state is None:
            return None
        weights = Weights(state.graphdef, state.graphstate, state.graphother, version=self.step)
        self._lent.append(weights)
        return weights

    # --- beginning ---

    def _begin(self) -> EasyDeLState:
        state, tx = self.job.begin(), self.job.tx
        self._model_facts = model_facts(state.model)
        dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(state.graphstate)}
        self._param_dtype = ", ".join(sorted(dtypes))
        # The frozen weights are not in a checkpoint: the ones that are there stay.
        template = state.abstract(tx).replace(graphother=state.graphother)
        restored = self._restore_newest(template)
        if restored is not None:
            _, state, saved = restored
            self.job.feed.load_state_dict(saved["loader"])
            self.meter.resume(saved.get("meter"), same_launch=self._is_of_this_launch(saved))
            self.job.adopt(state)  # releases the initial parameters
        else:
            state = state if state.opt_state is not None else state.init_tx(tx)
            state = self._start_at_point(self._continue_easydel(state))
        self.step = self._first_step = int(state.step)
        self.log.restart(self.step)
        kind, columns = self.arguments.progress_bar_type, self.job.method.record.progress_columns
        self.progress = Progress(kind, total=self.total, done=self.step, columns=columns)
        job, seconds = self.job, self.meter.get_earlier_step_seconds(self.step)
        self._say(format_header(job.method, state, job.feed, self.total, job.settings, seconds))
        if restored is not None:
            self._say(f"resumed from step {self.step} of {self.total}")
        self._train_step: TrainStep = build_train_step(
            state,
            self.job.method,
            self.job.schedule,
            rows=self.arguments.sequences_per_step // self.arguments.gradient_accumulation_steps,
            seed=self.arguments.seed,
        )
        return state

    def _continue_easydel(self, state: EasyDeLState) -> EasyDeLState:
        """Return the state of the newest run of EasyDeL's trainer in the directory, if there is
        one."""
        directory = Path(self.arguments.save_directory)
        if not self.arguments.resume_if_possible or not (
            any(directory.glob("run-*")) or any(directory.glob("*/run-*"))
        ):
            return state
        from ed_trainers.checkpoints.easydel_state import continue_easydel_run

        state = continue_easydel_run(state, directory, self._say)
        self.job.adopt(state)
        return state

    def _start_at_point(self, state: EasyDeLState) -> EasyDeLState:
        """Return a new state that counts the steps before `step_start_point` as done."""
        point, step = self.arguments.step_start_point, int(state.step)
        if point is None or point == step:
            return state
        if step and not self.arguments.force_step_start_point:
            raise ConfigError(
                f"the state has done {step} steps, and step_start_point is {point}: set "
                "force_step_start_point to count from there, or omit step_start_point"
            )
        if point >= self.total:
            raise ConfigError(
                f"step_start_point {point} leaves no step of a run of {self.total} steps: lower "
                "it, or make the run longer"
            )
        return state.at_step(point)

    def _restore_newest(
        self, template: EasyDeLState
    ) -> tuple[int, EasyDeLState, dict[str, Any]] | None:
        """Return the newest state of a copy in memory or of a checkpoint, with its run."""
        difference, steps = self.job.feed.difference, self.checkpoints.steps()
        if self._memory is not None:
            memory_copy = self._memory.restore_newest(template, after_step=max(steps, default=-1))
            if memory_copy is not None:
                step, _, saved = memory_copy
                location = f"the copy of step {step}"
                compare_runs(saved, self._run_facts(), location, difference, step)
                self._say(f"step {step} was read from the memory of the hosts")
                return memory_copy
        if not steps:
            return None
        return self.checkpoints.restore_newest(
            template, run=self._run_facts(), difference=difference
        )

    def _is_of_this_launch(self, saved: Mapping[str, Any]) -> bool:
        """Whether a checkpoint belongs to this elastic launch, whose folders in memory are
        neighbors."""
        saved_directory = saved["arguments"].get("memory_directory")
        now = self.arguments.memory_directory
        return (
            None not in (saved_directory, now)
            and Path(saved_directory).parent == Path(now or "").parent
        )

    def _run_facts(self) -> dict[str, Any]:
        facts = describe_run(
            self.arguments,
            total_steps=self.total,
            loader=self.job.feed.state_dict(),
            fingerprint=self.job.feed.fingerprint,
            model=self._model_facts,
            param_dtype=self._param_dtype,
            settings=self.job.settings,
        )
        return facts | {
            "meter": self.meter.get_checkpoint_values(stopped=self._stopped_by is not None)
        }

    # --- the steps ---

    def _train(self, state: EasyDeLState) -> None:
        self._unflatten = partial(jax.tree.unflatten, jax.tree.structure(state))
        self._leaves = tuple(jax.tree.leaves(state))
        del state
        self.meter.ready()
        self.job.notify("on_train_begin", self.step)
        is_at_start = self.step <= (self.arguments.step_start_point or 0)
        evaluates_at_start = (
            is_at_start and self.arguments.eval_on_start and self.job.evaluator is not None
        )
        if evaluates_at_start or (not is_at_start and self._evaluation_is_due()):
            self._evaluate()
        while self.step < self.total and self._stopped_by is None:
            self._one_step()
            self.checkpoints.poll()
            ends_here = self.step == self.job.until
            if ends_here:
                self.stop.ask("request")
            # Read once per step: a signal later in the step must not end the loop before a save.
            is_shared = self.step % self.arguments.report_steps == 0
            if jax.process_count() == 1 or ends_here or is_shared:
                self._stopped_by = self.stop.reason
                self._save_asked = self.stop.take_save()
            if self._profile.ends_with(self.step):
                self._finish_pending()
                self._profile.stop()
            if self._memory is not None and self.step % self.arguments.memory_save_steps == 0:
                # The row of this step must outlive a lost process if the copy does. Process 0 has
                # written the row when the processes meet.
                self._finish_pending()
                with self.meter.spending("checkpoint"):
                    barrier("memory copy")
                    self._memory.save(self.step, self._state(), run=self._run_facts())
            probes = [p for p in self.job.probes if self._is_time(p.every)]
            if probes or self._evaluation_is_due() or self._save_is_due():
                self._finish_pending()
                if self._evaluation_is_due():
                    self._evaluate()
                for probe in probes:
                    self._run_probe(probe)
                if self._save_is_due():
                    with self.meter.spending("checkpoint"):
                        self._save()
        self._finish_pending()

    def _one_step(self) -> None:
        self._profile.before(self.step + 1)
        with self.meter.fetching(self._devices_are_idle):
            feed = self.job.feed
            prepared = self.job.method.prepare(feed.batch(self.step))
            height = next(iter(prepared.values())).shape[0] * feed.parts
            if height != self.arguments.sequences_per_step:
                raise ConfigError(
                    f"train_dataset has batches of {height} sequences, but total_batch_size is "
                    f"{self.arguments.sequences_per_step}: an optimizer step uses one batch"
                )
            parts = microbatches(prepared, self.arguments.gradient_accumulation_steps)
            placement = self.job.method.placement
            if feed.parts == 1:  # whole batches, also those that the devices do not divide
                rows = height // self.arguments.gradient_accumulation_steps
                parts = pad_rows(parts, placement.padded_rows(rows), axis=1)
            placed = placement.place(parts, stacked=True, parts=feed.parts)
        while self._lent:
            self._lent.pop().end()
        self._leaves, report = self._call(placed)
        self.step += 1
        figures = {**feed.figures, **self.job.method.figures}
        self.job.method.observe(report)
        previous, self._pending = self._pending, (self.step, report, figures, feed.samples)
        if previous is not None:
            self._finish(*previous)
        if freed_memory.computes_in_calling_thread():
            self._finish_pending()

    def _call(self, batch: Batch) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
        """Begin a step; the first of each shape compiles, which the meter counts apart."""
        shapes = tuple(array.shape for array in batch.values())
        if shapes in self._compiled:
            return self._train_step(self._leaves, batch)
        if not self._compiled and "input_ids" in batch:
            self._count_flops(length=batch["input_ids"].shape[-1])
        self._compiled.add(shapes)
        with self.meter.spending("compile"):
            outputs = self._train_step(self._leaves, batch)
        freed_memory.keep()
        return outputs

    def _count_flops(self, length: int) -> None:
        """Log once how MFU is computed, if the peak of the devices is known."""
        peak, config = self.arguments.peak_flops_per_device, self.job.method.placement.config
        self.meter.utilization = utilization(self._state(), config, length=length, peak=peak)
        if self.meter.utilization is not None:
            self._say(self.meter.utilization.formula)

    def _devices_are_idle(self) -> bool:
        # jax.Array has it, the class that type checkers see has not.
        return self._pending is None or cast(Any, self._pending[1]["loss"]).is_ready()

    def _finish_pending(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._finish(*pending)

    def _finish(
        self,
        step: int,
        report: Mapping[str, jax.Array],
        batch_metrics: Mapping[str, float],
        samples: Samples,
    ) -> None:
        """Wait for a step's report, and show and log it."""
        figures = {name: float(value) for name, value in jax.device_get(dict(report)).items()}
        tokens = int(figures.pop("tokens"))
        self._divergence.check(step, figures, self.checkpoints.steps)
        self.meter.record_step(tokens)
        rate = self.meter.tokens_per_second
        assert self.progress is not None
        shows = step % self.arguments.report_steps == 0 or step in (1, self.total)
        shows = shows or self.progress.is_line_due()
        shown_metrics = (
            {**figures, **batch_metrics, "tokens_per_second": rate or 0.0} if shows else None
        )
        self.progress.step(step, shown_metrics)
        if not self._logs.is_due(step) and step not in (1, self.total):
            return
        del figures["weight"]
        row = {"step": step, "loss": figures.pop("loss"), **figures, **batch_metrics}
        self._write(row | {"tokens": tokens, "time": time.time()} | self.meter.row())
        if self.log.write_samples(step, samples):
            self.progress.print_samples(step, samples)

    def _write(self, row: Mapping[str, Any]) -> None:
        assert self.progress is not None
        self.log.write(row)
        self.progress.row(row)
        self.job.notify("on_log", row)

    # --- pauses ---

    def _is_time(self, every: int | None) -> bool:
        """Return whether a periodic task is due at this step; the last step counts."""
        return self.step == self.total or (every is not None and self.step % every == 0)

    def _run_probe(self, probe: Probe) -> None:
        state = self._shown_state()
        weights = Weights(state.graphdef, state.graphstate, state.graphother, version=self.step)
        with self.meter.spending("evaluation"):
            row, lines = probe.look(weights)
        weights.end()
        self._write({"step": self.step, **row, "time": time.time()})
        for line in lines:
            self._say(f"step {self.step}: {line}")

    def _shown_state(self) -> EasyDeLState:
        """The state whose model is evaluated: the running mean, where there is one."""
        return self._state().get_ema_state() if self.arguments.use_ema else self._state()

    def _evaluation_is_due(self) -> bool:
        strategy = self.arguments.eval_strategy
        if self.job.evaluator is None or strategy == "no":
            return False
        if self.step != self.total and not self._evaluations.is_due(self.step):
            return False
        last = self.log.last(evaluation=True)
        return last is None or last["step"] != self.step

    def _evaluate(self) -> None:
        assert self.job.evaluator is not None
        assert self.progress is not None
        began = time.monotonic()
        with self.meter.spending("evaluation"):
            metrics = self.job.evaluator.run(self._shown_state(), self.progress.evaluating)
        if self.arguments.save_best_k or self.arguments.load_best_model_at_end:
            self._best.check(metrics)
        seconds = time.monotonic() - began
        self._write({"step": self.step, **metrics, "eval_seconds": seconds, "time": time.time()})
        self.progress.step(self.step)
        self.progress.print_evaluation(self.step, metrics)
        self.job.notify("on_evaluate", metrics)

    def _save_is_due(self) -> bool:
        if self._stopped_by is not None or self._save_asked:
            return True
        if self.step == self.total:
            return self.arguments.do_last_save
        return self._saves.is_due(self.step)

    def _save(self) -> None:
        self._save_asked = False
        self.stop.note_save()
        self.job.lock.check()
        # The rows of these steps must outlive a crash if the checkpoint does.
        self.log.flush()
        if self.checkpoints.save(self.step, self._state(), run=self._run_facts()):
            self.job.notify("on_save", self.step)

    # --- the end ---

    def _end(self) -> dict[str, Any]:
        self.job.lock.check()
        stopped_by = None if self.step >= self.total else self._stopped_by
        steps, best = self.checkpoints.steps(), self.checkpoints.best()
        path = self.checkpoints.path(steps[-1]) if steps else None
        directory = Path(self.arguments.save_directory)
        which = ""
        if stopped_by is None:
            which = self._settle(best)
        if stopped_by is not None:
            self._say(
                f"stopped by {stopped_by} at step {self.step} of {self.total}; "
                f"to continue, run the same command again: it resumes from {path}"
            )
        failed = self.checkpoints.failed or (self._mirror and self._mirror.failed)
        if stopped_by is None and self.arguments.do_last_save:
            not_saved = self._save_model(directory / MODEL, which, path)
            failed = failed or not_saved
        self.job.notify("on_train_end", self.step)
        if failed is not None:
            raise CheckpointError(failed)
        return {
            "state": self._state(),
            "metrics": self._summary(),
            "trained_steps": self.step - self._first_step,
            "checkpoint_path": path,
            "best_checkpoint_path": None if best is None else self.checkpoints.path(best),
            "stopped_by": stopped_by,
        }

    def _save_model(self, target: Path, which: str, checkpoint: Path | None) -> str | None:
        """Write the trained model; return why it could not be, where the disk is full."""
        try:
            saved_path = self.job.save_model(target)
        except Exception as error:
            if not disk.is_full(error):
                raise
            room = disk.room(target, count_bytes(jax.tree.leaves(self._state().graphstate)))
            retry_advice = (
                f"; {checkpoint} is intact: run the same command again" if checkpoint else ""
            )
            return f"the model could not be written to {target}: {room}{retry_advice}"
        saved_part = "the model" if saved_path == target else "the adapter of the model"
        self._say(f"trained {self.step} steps; {saved_part}{which} is in {saved_path}")
        return None

    def _settle(self, best: int | None) -> str:
        """Replace the parameters by the final parameters of the run; return which."""
        state, which = self._state(), ""
        if self.arguments.load_best_model_at_end and best is not None:
            row = self.log.evaluation(best) or {}
            which = f" of step {best}, where {self._best.metric} is {row.get(self._best.metric)},"
            if best != self.step:
                state = self.checkpoints.restore(best, state)
        if self.arguments.use_ema:
            state = state.get_ema_state()
        self._leaves = tuple(jax.tree.leaves(state))
        return which

    def _summary(self) -> dict[str, float]:
        trained = self.log.last(evaluation=False) or {}
        evaluated = self.log.last(evaluation=True) or {}
        summary: dict[str, float] = {"steps": self.step}
        columns = self.job.method.record.progress_columns
        summary |= {f"train_{name}": trained[name] for name in columns if name in trained}
        summary |= {name: value for name, value in evaluated.items() if name.startswith("eval_")}
        return summary | self.meter.summary()

    def _state(self) -> EasyDeLState:
        assert self._unflatten is not None
        return self._unflatten(self._leaves)

    def _say(self, message: str) -> None:
        if self.progress is not None:
            self.progress.say(message)
        elif jax.process_index() == 0:
            print(message, flush=True)
