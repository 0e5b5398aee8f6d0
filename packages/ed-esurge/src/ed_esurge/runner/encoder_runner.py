"""`EncoderRunner`: runs whole prompts through an embedding model or a classifier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_models.adapters.values import Adapter
from ed_models.protocol import LanguageModel
from tqdm import tqdm

from ed_esurge.core.plan import NewSequence, PlanRow, StepPlan
from ed_esurge.core.request import RequestError
from ed_esurge.model import classifies, get_embedding_settings, get_vocab_size
from ed_esurge.runner.buckets import geometric_lengths
from ed_esurge.runner.result import StepResult
from ed_esurge.runner.weights import ServedWeights
from ed_esurge.sampling import PoolingParams, SamplingParams

#: Length of the shortest bucket in tokens.
_SHORTEST = 16


def bucket_rows(
    rows: Sequence[PlanRow], seqs: Sequence[int], lengths: Sequence[int]
) -> Iterator[tuple[list[PlanRow], int, int]]:
    """Yield the batches of a step: rows, and the number of sequences and tokens to pad to.

    A batch contains the rows of one length bucket. More than half of the sequences of a batch are
    rows, unless the smallest batch is larger.

    Args:
        rows: rows of a step.
        seqs: possible numbers of sequences, ascending.
        lengths: possible numbers of tokens, ascending.
    """
    rows_by_length: dict[int, list[PlanRow]] = {}
    for row in rows:
        length = next(size for size in lengths if size >= len(row.token_ids))
        rows_by_length.setdefault(length, []).append(row)
    for length, remaining_rows in sorted(rows_by_length.items()):
        while remaining_rows:
            count = len(remaining_rows)
            size = next((size for size in seqs if size >= count), seqs[-1])
            if 2 * count <= size:
                size = max((one for one in seqs if one <= count), default=size)
            yield remaining_rows[:size], size, length
            remaining_rows = remaining_rows[size:]


class EncoderRunner:
    """Implements `Runner` for a model without keys and values, such as BERT.

    Each step runs complete prompts and returns one vector per prompt: the embedding of the model's
    own pooling, or the logits of a classifier. Prompts of similar lengths form a padded batch, so a
    long prompt does not pad the short prompts of the same step.

    Args:
        model: the model. Only matrices that the native library multiplies are copied.
        max_num_seqs: maximum number of prompts of a step.
        max_model_len: maximum number of tokens of a prompt.
        max_num_batched_tokens: maximum number of tokens of a step.
    """

    host = items = num_states = None
    num_pages: Mapping[str, int] = {}
    max_logprobs = 0

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.weights = ServedWeights(model)
        self.model = self.weights.model
        self.vocab_size = get_vocab_size(model)
        self.allocated = True
        self.num_traces = self.num_pending = 0
        self._classifies = classifies(model)
        settings = get_embedding_settings(model)
        self._excludes_prompts = settings is not None and not settings.include_prompt
        self._reads_types = self._classifies and "token_type_ids" in model.input_names
        self._num_slots, self._num_tokens = max_num_seqs, max_num_batched_tokens
        self._seqs = geometric_lengths(1, max_num_seqs, 4)
        self._lengths = geometric_lengths(min(_SHORTEST, max_model_len), max_model_len, 2)
        self._started: dict[int, NewSequence] = {}  # by slot
        self._step = jax.jit(self._vectors)
        self._token_step = jax.jit(self._states)

    def memory_bytes(self) -> int:
        """See `Runner`. An encoder has no memory of sequences."""
        return sum(leaf.nbytes for leaf in self.weights.leaves) if self.weights.there else 0

    def describe(self) -> str:
        """Return the number of shapes, for the log."""
        return f"an encoder with {len(self._seqs) * len(self._lengths)} shapes"

    def allocate(self) -> None:
        """Do nothing: an encoder has no memory of sequences."""
        self.allocated = True

    def free(self) -> None:
        """Do nothing: an encoder has no memory of sequences."""
        self.allocated = False

    def stop_compiling(self, *, wait: bool = True) -> None:
        """See `Runner`: all functions are compiled before the engine is ready."""

    def compile_all(self, progress: tqdm[NoReturn]) -> None:
        """Compile the function for all shapes and update the progress bar."""
        progress.reset(len(self._seqs) * len(self._lengths))
        for seqs in self._seqs:
            for length in self._lengths:
                self._call(*self._batch(seqs, length))
                progress.update()

    def compile_first(self, progress: tqdm[NoReturn]) -> None:
        """See `Runner`. All functions are compiled."""
        self.compile_all(progress)

    def hold(self, params: SamplingParams | PoolingParams) -> None:
        """Return None: an encoder samples no tokens, so requests have no grammar."""
        return None

    def load_adapter(self, number: int, place: int, adapter: Adapter) -> None:
        """Raise ConfigError: adapters are not supported."""
        raise ConfigError("an encoder does not support LoRA adapters: merge the adapter first")

    def run(self, plan: StepPlan) -> StepResult:
        """Start a step and return without waiting for the device; see `Runner.run`."""
        for new in plan.started:
            self._started[new.slot] = new
        by_token = [row for row in plan.rows if self._returns_tokens(row)]
        pooled = [row for row in plan.rows if not self._returns_tokens(row)]
        vectors = states = None
        for rows, seqs, length in bucket_rows(pooled, self._seqs, self._lengths):
            part = self._call(*self._fill_batch(rows, seqs, length))
            vectors = part if vectors is None else vectors + part  # of different slots
        starts = self._starts(plan) if by_token else {}
        for rows, seqs, length in bucket_rows(by_token, self._seqs, self._lengths):
            ids, mask, _, _, _, normalize = self._fill_batch(rows, seqs, length)
            first = np.full(seqs, self._num_tokens, np.int32)  # out of range
            first[: len(rows)] = [starts[row.slot] for row in rows]
            part = self._token_step(self.weights.leaves, ids, mask, first, normalize)
            states = part if states is None else states + part  # of different tokens
        nothing = jnp.zeros((1, 3), jnp.int32)  # no row samples
        places = (0,) * len(plan.rows)
        return StepResult(plan, nothing, places, vectors=vectors, states=states)

    def _returns_tokens(self, row: PlanRow) -> bool:
        params = self._started[row.slot].params
        if not isinstance(params, PoolingParams) or params.task is None:
            return False
        if self._classifies:
            raise RequestError(row.request_id) from ConfigError(
                f"task={params.task!r} requires an embedding model, and the model is a classifier"
            )
        return True

    @staticmethod
    def _starts(plan: StepPlan) -> dict[int, int]:
        """Return the place of the first token of each slot among the flat tokens of a step."""
        starts, place = {}, 0
        for row in plan.rows:
            starts[row.slot] = place
            place += len(row.token_ids)
        return starts

    def _fill_batch(
        self, rows: Sequence[PlanRow], seqs: int, length: int
    ) -> tuple[np.ndarray, ...]:
        """Return the arguments of `_vectors` for some rows of a step."""
        batch = ids, mask, types, prompts, slots, normalize = self._batch(seqs, length)
        for index, row in enumerate(rows):
            new = self._started[row.slot]
            if not isinstance(new.params, PoolingParams):
                raise RequestError(row.request_id) from ConfigError("an encoder samples no tokens")
            ids[index, : len(row.token_ids)] = row.token_ids
            mask[index, : len(row.token_ids)] = 1
            if new.params.second_text_start is not None:
                types[index, new.params.second_text_start : len(row.token_ids)] = 1
            prompts[index] = new.params.prompt_length
            slots[index] = row.slot
            normalize[index] = new.params.normalize and not self._classifies
        return batch

    def _batch(self, seqs: int, length: int) -> tuple[np.ndarray, ...]:
        """Return the empty arguments of `_vectors`.

        Token ids, mask and token types have shape [seqs, length]; lengths of prompts, slots and
        flags have shape [seqs].
        """
        ids, mask, types = (np.zeros((seqs, length), np.int32) for _ in range(3))
        mask[:, 0] = 1  # a row without tokens would divide by zero
        # Index `num_slots` is out of range, so that writes to it are dropped.
        slots = np.full(seqs, self._num_slots, np.int32)
        return ids, mask, types, np.zeros(seqs, np.int32), slots, np.zeros(seqs, bool)

    def _call(self, *batch: np.ndarray) -> jax.Array:
        return self._step(self.weights.leaves, *batch)

    def _vectors(
        self,
        leaves: list[jax.Array],
        ids: jax.Array,
        mask: jax.Array,
        types: jax.Array,
        prompts: jax.Array,
        slots: jax.Array,
        normalize: jax.Array,
    ) -> jax.Array:
        """Return the vector of each slot, float32 [num_slots, d]."""
        self.num_traces += 1
        inputs: dict[str, Any] = {"token_type_ids": types} if self._reads_types else {}
        inputs |= {"prompt_length": prompts} if self._excludes_prompts else {}
        output: Any = self.weights.merge_leaves(leaves)(ids, attention_mask=mask, **inputs)
        vectors = output.logits if self._classifies else output.embeddings
        vectors = vectors.astype(jnp.float32)
        vectors = jnp.where(normalize[:, None], _unit(vectors), vectors)
        empty = jnp.zeros((self._num_slots, vectors.shape[-1]), jnp.float32)
        return empty.at[slots].set(vectors, mode="drop")

    def _states(
        self,
        leaves: list[jax.Array],
        ids: jax.Array,
        mask: jax.Array,
        starts: jax.Array,
        normalize: jax.Array,
    ) -> jax.Array:
        """Return the last hidden state of each flat token, float32 [num_tokens, d].

        Args:
            starts: place of the first token of each sequence; `num_tokens` = no tokens.
        """
        self.num_traces += 1
        output: Any = self.weights.merge_leaves(leaves)(ids, attention_mask=mask)
        states = output.last_hidden_state.astype(jnp.float32)
        states = jnp.where(normalize[:, None, None], _unit(states), states)
        places = starts[:, None] + jnp.arange(ids.shape[1])
        places = jnp.where(mask > 0, places, self._num_tokens)
        empty = jnp.zeros((self._num_tokens, states.shape[-1]), jnp.float32)
        return empty.at[places].set(states, mode="drop")


def _unit(vectors: jax.Array) -> jax.Array:
    """Return vectors of length 1."""
    norm = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / jnp.maximum(norm, 1e-12)
