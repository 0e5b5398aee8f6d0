"""The process of an engine: samples with the newest weights of the trainer.

The trainer sends `weights` and `add`; the process sends `part`, `done` and `failed`. Weights are
replaced between two steps of the engine. The tokens of the step before are read first, so that each
token is tagged with the version that sampled it. The keys and values of unfinished sequences are
computed again with the new weights.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from ed_esurge import SamplingParams, eSurge
from ed_esurge.core.commands import Pause
from ed_esurge.engine.connection import Connection, ConnectionLost
from ed_infra.errors import ConfigError
from ed_trainers.options.online import OnlineArguments
from ed_trainers.stored.arrays import flat_arrays, from_flat
from flax import nnx

from ed_elarge.config.checks.training import GENERATING
from ed_elarge.config.sections import add_rollout_defaults
from ed_elarge.engine.end_tokens import stop_after_answers
from ed_elarge.engine.lending import get_records
from ed_elarge.model import eLargeModel

#: Number of new tokens of a sample after which the trainer records them.
_PART = 64


def set_weights(model: nnx.Module, arrays: Mapping[str, Any]) -> None:
    """Replace arrays of a model by name.

    Raises:
        ConfigError: a name or a shape differs, because this process has the model of another run.
    """
    state = nnx.state(model)
    model_arrays = flat_arrays(state)
    for name, array in arrays.items():
        if name not in model_arrays or model_arrays[name].shape != array.shape:
            raise ConfigError(
                f"the trainer's weights {name} {list(array.shape)} do not fit the model of this "
                "process: give every process the same run file and the same files"
            )
        model_arrays[name] = jax.device_put(array, model_arrays[name].sharding)
    nnx.update(model, from_flat(state, model_arrays))


@dataclass
class _Open:
    """An unfinished sample: the tokens that the trainer does not know yet."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    masks: list[np.ndarray] | None = None


class EngineWorker:
    """Serves the requests of one trainer.

    Args:
        connection: the connection to the trainer.
        elm: the run; its model gets the weights of the trainer.
    """

    def __init__(self, connection: Connection, elm: eLargeModel):
        self._connection = connection
        arguments = elm.build_training_arguments()
        assert isinstance(arguments, OnlineArguments), "the method samples"
        self._model = elm.part("model")
        if elm.config.tasks[0] in GENERATING:
            stop_after_answers(self._model, elm.part("tokenizer"))
        options = elm.config.asynchronous
        assert options is not None, "the trainer has the section"
        config = add_rollout_defaults(
            elm.config.engine_of_training(),
            length=arguments.row_length,
            completions=arguments.completions_per_generation * (1 + options.max_staleness),
        )
        self._engine = eSurge(
            self._model,
            elm.part("tokenizer"),
            config,
            records=get_records(arguments),
        )
        self._version = -1
        self._open: dict[str, _Open] = {}
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def serve(self) -> None:
        """Sample until the trainer closes the connection."""
        threading.Thread(target=self._receive, daemon=True).start()
        while True:
            received = [] if self._open else [self._messages.get()]
            while not self._messages.empty():
                received.append(self._messages.get())
            messages = [message for message in received if message is not None]
            if len(messages) < len(received):
                return  # the trainer closed the connection
            newest = max((n for n, m in enumerate(messages) if m["do"] == "weights"), default=-1)
            for number, message in enumerate(messages):
                if message["do"] == "add":
                    for sample in message["samples"]:
                        self._add(sample)
                elif number == newest:
                    self._replace_weights(message["version"], message["arrays"])
            if self._open:
                self._take_outputs()

    def _receive(self) -> None:
        try:
            while True:
                self._messages.put(self._connection.receive())
        except ConnectionLost:
            self._messages.put(None)

    def _add(self, sample: Mapping[str, Any]) -> None:
        params = SamplingParams(
            **{
                **sample["params"],
                "n": 1,
                "logprobs": 0,
                "logprobs_mode": "processed_logprobs",
                "detokenize": False,
                "seed": sample["seed"],
                "max_tokens": sample["max_tokens"],
            }
        )
        self._open[sample["name"]] = _Open()
        self._engine.add_request(sample["name"], sample["prompt"], params)

    def _replace_weights(self, version: int, arrays: Mapping[str, Any]) -> None:
        """Report the tokens of the present weights, then replace the weights."""
        if self._open:
            # The results of a running step belong to the present weights.
            self._engine.execute(Pause(free_pages=False))
            self._take_outputs()
            for name, open_sample in self._open.items():
                if open_sample.tokens:
                    self._send("part", name, open_sample)
                    self._open[name] = _Open()
        set_weights(self._model, arrays)
        self._engine.update_model_weights(self._model)
        self._engine.resume()
        self._version = version

    def _take_outputs(self) -> None:
        for output in self._engine.step():
            open_sample, new = self._open[output.request_id], output.outputs[0]
            open_sample.tokens += new.token_ids
            if new.sampling_masks is not None:
                open_sample.masks = (open_sample.masks or []) + new.sampling_masks
            open_sample.logprobs += [
                float(position[token].logprob)
                for token, position in zip(new.token_ids, new.logprobs or (), strict=True)
            ]
            if output.error is not None:
                del self._open[output.request_id]
                text = output.error
                self._connection.send(
                    {"do": "failed", "task": "sample", "name": output.request_id, "text": text}
                )
            elif not output.finished and len(open_sample.tokens) >= _PART:
                self._send("part", output.request_id, open_sample)
                self._open[output.request_id] = _Open()
            elif output.finished:
                del self._open[output.request_id]
                ended = new.finish_reason != "length"
                experts = new.routed_experts
                self._send("done", output.request_id, open_sample, ended=ended, experts=experts)

    def _send(self, kind: str, name: str, open_sample: _Open, **more: object) -> None:
        content = {
            "tokens": open_sample.tokens,
            "logprobs": open_sample.logprobs,
            "masks": open_sample.masks,
            "version": self._version,
        }
        self._connection.send({"do": kind, "task": "sample", "name": name, **content, **more})
