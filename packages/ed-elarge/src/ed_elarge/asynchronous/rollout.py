"""`AsynchronousRollout`: the samples of a run from engines in processes of their own.

The prompts of a generation are issued at most `max_staleness` generations before the generation is
trained, and generations are trained in the order of issue. A long sample therefore delays its
generation and is never dropped. All samples pass through the ledger, which also replays them after
a crash: a step that is repeated reads exactly the samples of its first execution.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ed_esurge.engine.wire import encode_message
from ed_esurge.model import get_vocab_size
from ed_infra.errors import ConfigError, EasyDeLError
from ed_trainers.online.completions import ENVIRONMENT_REWARD
from ed_trainers.online.sample_ledger import (
    GIVEN,
    LEDGER,
    SampleKey,
    SampleLedger,
    SamplePart,
    build_sample,
)
from ed_trainers.options.online import OnlineArguments, RewardedArguments
from ed_trainers.rollout import Sampled, SampleRequest, Weights
from ed_trainers.stored.arrays import flat_arrays

from ed_elarge.asynchronous.joining import ENGINE, ENVIRONMENT
from ed_elarge.asynchronous.message_check import TaskLimits, read_task
from ed_elarge.asynchronous.workers import ConnectedWorker, RunWorkers
from ed_elarge.model import eLargeModel

#: Seconds between two looks at the processes, and between two messages about a missing engine.
_LOOK, _REMIND = 0.5, 60.0


class AsynchronousRollout:
    """Completes prompts in other processes; see `ed_trainers.rollout.AheadRollout`.

    The processes start with the first generation.

    Args:
        elm: the run, with the section `asynchronous`.
    """

    def __init__(self, elm: eLargeModel):
        options, arguments = elm.config.asynchronous, elm.build_training_arguments()
        assert options is not None, "built only with the section"
        assert isinstance(arguments, OnlineArguments), "the method samples"
        if jax.process_count() > 1:
            raise ConfigError(
                "asynchronous training needs a trainer of one process: start it without launch "
                "options for several processes, and add engines of other hosts with `elarge join`"
            )
        self.max_staleness = options.max_staleness
        self._environment = elm.config.environment
        self.reward_names = (ENVIRONMENT_REWARD,) if self._environment else ()
        self._elm, self._options = elm, options
        self._has_replies = self._environment is not None or bool(arguments.tools)
        self._scores = isinstance(arguments, RewardedArguments) and bool(arguments.reward_functions)
        self._changed = threading.Condition(threading.RLock())
        self._ledger: SampleLedger | None = None
        self._workers: RunWorkers | None = None
        self._requests: dict[int, SampleRequest] = {}
        # The worker of each task, by kind and key: `sample`, the tokens of a message; `turn`, the
        # reply of an environment; `score`, the rewards of the samples of a prompt.
        self._tasks: dict[str, dict[SampleKey, ConnectedWorker | None]] = {
            "sample": {},
            "turn": {},
            "score": {},
        }
        self._ready: list[ConnectedWorker] = []
        self._weights = b""
        self._version = -1  # of the published weights
        self._vocab_size = 0
        self._failure: EasyDeLError | None = None

    # --- for the trainer ---

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Mapping[str, Any],
        weights: Weights,
        *,
        seeds: Sequence[int] | None = None,
        images: Mapping[str, np.ndarray] | None = None,
    ) -> list[Sampled]:
        """Complete held-out prompts with an engine in this process."""
        from ed_elarge.engine.lending import engine_of_run
        from ed_elarge.engine.rollout import EngineRollout

        lent = engine_of_run(self._elm, weights.model)
        return EngineRollout(lent).generate(prompts, params, weights, seeds=seeds, images=images)

    def publish(self, weights: Weights) -> None:
        """Send the weights to all engines, which replace theirs between two steps."""
        # Engines have the frozen weights of the run file.
        arrays = jax.device_get(flat_arrays(weights.trained))
        message = encode_message({"do": "weights", "version": weights.version, "arrays": arrays})
        with self._changed:
            self._weights, self._version = message, max(self._version, weights.version)
            for worker in self._of(ENGINE):
                worker.send(message)

    def issue(self, request: SampleRequest) -> None:
        """Record a generation, and give its unfinished samples to the engines."""
        ledger = self._open()
        with self._changed:
            if request.number in self._requests:
                return
            ledger.issue(request)  # also compares the prompts of a repeated step
            if request.number in ledger.consumed:
                return
            self._requests[request.number] = request
            keys = [(request.number, place) for place in range(len(request.seeds))]
            for key in keys:
                if not ledger.is_finished(key):
                    parts = ledger.parts(key)
                    self._tasks["turn" if parts and parts[-1].ends else "sample"][key] = None
            if self._scores:
                for place in range(0, len(keys), request.copies):
                    self._score((request.number, place))
            self._dispatch()

    def take(self, number: int, version: int) -> tuple[list[Sampled], dict[str, float]]:
        """Wait for a generation, and record that the step `version` consumes it.

        Raises:
            EasyDeLError: a process failed on the input, or processes end again and again.
        """
        ledger, began = self._open(), time.monotonic()
        request = self._requests.get(number)
        count = len(request.seeds) if request is not None else ledger.size(number)
        keys = [(number, place) for place in range(count)]
        reminded = began
        with self._changed:
            while not all(self._is_complete(ledger, key) for key in keys):
                if self._failure is not None:
                    raise self._failure
                assert self._workers is not None, "started with the ledger"
                self._workers.look()
                self._changed.wait(_LOOK)
                if not self._of(ENGINE) and time.monotonic() - reminded > _REMIND:
                    reminded = time.monotonic()
                    print(f"no engine is ready; address: {self._workers.address}", flush=True)
            self._requests.pop(number, None)
        samples = [ledger.sample(key) for key in keys]
        ledger.consume(number, version)
        ages = np.repeat(
            [version - v for one in samples for v, _ in one.versions],
            [n for one in samples for _, n in one.versions],
        )
        return samples, {
            "staleness/mean": float(ages.mean()) if ages.size else 0.0,
            "staleness/max": float(ages.max()) if ages.size else 0.0,
            "rollout_wait_seconds": time.monotonic() - began,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the ledger."""
        return {} if self._ledger is None else {"position": self._ledger.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the ledger has all records that the checkpoint needs."""
        if state:
            self._open().check_position(int(state["position"]))

    def close(self) -> None:
        """End all processes, and write the ledger to the disk."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    @property
    def processes(self) -> dict[str, list[int]]:
        """Ids of the processes of this host by role."""
        return {} if self._workers is None else self._workers.processes

    # --- workers ---

    def _open(self) -> SampleLedger:
        """Return the ledger; the first call opens it and starts the processes."""
        if self._ledger is None:
            run, arguments = self._elm.config, self._elm.build_training_arguments()
            rewards = getattr(arguments, "reward_functions", ())
            self._ledger = SampleLedger(
                run.directory / LEDGER,
                {
                    "trainer_type": run.method,
                    "seed": arguments.seed,
                    "data": self._elm.build_dataset().fingerprint,
                    "reward_functions": [repr(entry) for entry in rewards],
                },
            )
            if self._ledger.cut:
                print(f"{LEDGER}: {self._ledger.cut} incomplete bytes were cut off", flush=True)
            self._vocab_size = get_vocab_size(self._elm.part("model"))
            serves = self._scores or self._has_replies
            counts = {
                ENGINE: self._options.engines,
                ENVIRONMENT: self._options.environment_processes if serves else 0,
            }
            self._workers = RunWorkers(
                counts,
                self._options.listen,
                {
                    "file": str(Path(run.document.name).absolute()),
                    "sections": dict(run.written),
                    "directory": os.getcwd(),
                },
                run.directory / "workers",
                on_ready=self._on_ready,
                on_message=self._on_message,
                on_lost=self._on_lost,
            )
        return self._ledger

    def _of(self, role: str) -> list[ConnectedWorker]:
        return [worker for worker in self._ready if worker.role == role]

    def _on_ready(self, worker: ConnectedWorker) -> None:
        with self._changed:
            self._ready.append(worker)
            if worker.role == ENGINE and self._weights:
                worker.send(self._weights)
            self._dispatch()

    def _on_lost(self, worker: ConnectedWorker) -> None:
        with self._changed:
            if worker in self._ready:
                self._ready.remove(worker)
            for tasks in self._tasks.values():
                tasks |= {key: None for key, owner in tasks.items() if owner is worker}
            self._dispatch()

    def _on_message(self, worker: ConnectedWorker, message: Mapping[str, Any]) -> None:
        kind, key = read_task(message, worker.role)
        number, place = key
        with self._changed:
            ledger = self._ledger
            if ledger is None or self._tasks[kind].get(key) is not worker:
                return
            if message["do"] != "failed":
                self._limits(ledger, key).check(kind, message)
            if self._workers is not None:
                self._workers.in_vain[worker.role] = 0
            if message["do"] == "failed":
                self._failure = EasyDeLError(message["text"])
                self._changed.notify_all()
                return
            if kind == "score":
                for offset, rewards in enumerate(message["rewards"]):
                    ledger.score((number, place + offset), rewards)
            elif kind == "turn":
                self._on_turn(ledger, key, message)
            elif not self._on_tokens(ledger, key, message):
                return
            del self._tasks[kind][key]
            worker.load -= 1
            self._dispatch()
            self._changed.notify_all()

    def _limits(self, ledger: SampleLedger, key: SampleKey) -> TaskLimits:
        """Return what the result of a task may contain."""
        request = self._requests[key[0]]
        token_count = sum(len(part.tokens) for part in ledger.parts(key))
        room = request.params["max_tokens"] - token_count
        return TaskLimits(
            self._vocab_size,
            room,
            token_count,
            self._version,
            request.copies,
            has_reward=self._environment is not None,
        )

    def _on_tokens(self, ledger: SampleLedger, key: SampleKey, message: Mapping[str, Any]) -> bool:
        """Record tokens of an engine; return whether its task is done."""
        done = message["do"] == "done"
        part = SamplePart(
            message["tokens"],
            message["logprobs"],
            message["version"],
            done,
            message.get("experts"),
            message["masks"],
        )
        if done and not self._has_replies:
            self._finish(ledger, key, [*ledger.parts(key), part], ended=message["ended"])
            return True
        ledger.add_part(key, part)
        if done:
            self._tasks["turn"][key] = None
        return done

    def _on_turn(self, ledger: SampleLedger, key: SampleKey, message: Mapping[str, Any]) -> None:
        """Record the reply of an environment."""
        if message["ends"]:
            done, reward = message["done"], message["reward"]
            self._finish(ledger, key, ledger.parts(key), ended=done, reward=reward)
            return
        tokens = message["tokens"]
        ledger.add_part(key, SamplePart(tokens, [0.0] * len(tokens), GIVEN))
        self._tasks["sample"][key] = None

    def _finish(
        self,
        ledger: SampleLedger,
        key: SampleKey,
        parts: Sequence[SamplePart],
        *,
        ended: bool,
        reward: float | None = None,
    ) -> None:
        ledger.finish(key, build_sample(parts, ended=ended, reward=reward))
        if self._scores:
            number, place = key
            self._score((number, place - place % self._requests[number].copies))

    # --- tasks ---

    def _is_complete(self, ledger: SampleLedger, key: SampleKey) -> bool:
        return ledger.is_finished(key) and (not self._scores or ledger.is_scored(key))

    def _score(self, group: SampleKey) -> None:
        """Queue the samples of a prompt for the rewards, if all of them are finished."""
        number, first = group
        ledger, request = self._open(), self._requests[number]
        keys = [(number, first + offset) for offset in range(request.copies)]
        if all(map(ledger.is_finished, keys)) and not all(map(ledger.is_scored, keys)):
            self._tasks["score"].setdefault(group, None)

    def _dispatch(self) -> None:
        """Give the tasks without a worker to the workers with the fewest tasks."""
        engines, environments = self._of(ENGINE), self._of(ENVIRONMENT)
        if engines and self._weights:
            shares: dict[ConnectedWorker, list[dict[str, Any]]] = {}
            for group in self._waiting_groups():
                worker = min(engines, key=lambda candidate: candidate.load)
                shares.setdefault(worker, []).extend(map(self._sample_task, group))
                self._tasks["sample"] |= dict.fromkeys(group, worker)
                worker.load += len(group)
            for worker, samples in shares.items():
                worker.send(encode_message({"do": "add", "samples": samples}))
        if not environments:
            return
        for kind, task in (("turn", self._turn_task), ("score", self._score_task)):
            tasks = self._tasks[kind]
            for key in [key for key, owner in tasks.items() if owner is None]:
                worker = tasks[key] = min(environments, key=lambda candidate: candidate.load)
                worker.load += 1
                worker.send(encode_message({"do": kind, "name": f"{key[0]}/{key[1]}", **task(key)}))

    def _waiting_groups(self) -> Iterable[list[SampleKey]]:
        """Return the samples without a worker in the order of issue, those of a prompt together."""
        groups: dict[SampleKey, list[SampleKey]] = {}
        for (number, place), owner in self._tasks["sample"].items():
            if owner is None:
                group = number, place // self._requests[number].copies
                groups.setdefault(group, []).append((number, place))
        return groups.values()

    def _sample_task(self, key: SampleKey) -> dict[str, Any]:
        number, place = key
        request, ledger = self._requests[number], self._open()
        previous_tokens = [token for part in ledger.parts(key) for token in part.tokens]
        params = dict(request.params)
        return {
            "name": f"{number}/{place}",
            "prompt": [*request.prompts[place // request.copies], *previous_tokens],
            "max_tokens": params.pop("max_tokens") - len(previous_tokens),
            "seed": request.seeds[place],
            "params": params,
        }

    def _turn_task(self, key: SampleKey) -> dict[str, Any]:
        number, place = key
        request, parts = self._requests[number], self._open().parts(key)
        messages: list[list[int]] = [[]]  # of the model; a part that ends completes one
        for part in parts:
            if part.version != GIVEN:
                messages[-1] += part.tokens
            if part.ends:
                messages.append([])
        token_count = sum(len(part.tokens) for part in parts)
        return {
            "row": dict(request.rows[place // request.copies]),
            "messages": messages[:-1],
            "room": request.params["max_tokens"] - token_count,
        }

    def _score_task(self, key: SampleKey) -> dict[str, Any]:
        number, first = key
        request, ledger = self._requests[number], self._open()
        samples = [ledger.sample((number, first + offset)) for offset in range(request.copies)]
        return {
            "row": dict(request.rows[first // request.copies]),
            "completion_ids": [list(sample.token_ids) for sample in samples],
            "given": [list(map(list, sample.given)) for sample in samples],
        }
