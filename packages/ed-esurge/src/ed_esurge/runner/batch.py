"""From a `StepPlan` to one flat buffer of numbers, and back to named arrays on the device.

A step has some twenty small inputs. Each costs a transfer of its own, so they travel as one int32
array (floats by their bits) and are sliced apart inside the jitted step, where that is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from ed_layers.cache import RaggedBatch

from ed_esurge.core.plan import StepPlan
from ed_esurge.core.request import Request
from ed_esurge.runner.buckets import Shape
from ed_esurge.runner.sampler import SamplerRows

GROUP = "full"

# Fields of a sequence slot: (name, is_float).
SEQ_FIELDS = (
    ("kv_lens", False),
    ("logits_at", False),
    ("slot", False),
    ("seed", False),
    ("top_k", False),
    ("num_logprobs", False),
    ("temperature", True),
    ("top_p", True),
    ("min_p", True),
    ("presence_penalty", True),
    ("frequency_penalty", True),
    ("repetition_penalty", True),
)
TOKEN_FIELDS = ("token_ids", "seq_of_token", "slots")


@dataclass(frozen=True)
class StepInput:
    """The arrays of a step, on the device.

    Attributes:
        token_ids: [1, T].
        ragged: which token belongs where.
        logits_at: flat index of each sequence's last token; [n].
        rows: how each sequence samples.
    """

    token_ids: jax.Array
    ragged: RaggedBatch
    logits_at: jax.Array
    rows: SamplerRows


class Fields:
    """Where each field lies in the buffer of a shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.ranges: dict[str, slice] = {}
        start = 0
        sizes = [(name, shape.tokens) for name in TOKEN_FIELDS]
        sizes += [(name, shape.seqs) for name, _ in SEQ_FIELDS]
        sizes += [
            ("cu_q_lens", shape.seqs + 1),
            ("page_table", shape.seqs * shape.pages),
            ("num_seqs", 1),
        ]
        for name, size in sizes:
            self.ranges[name] = slice(start, start + size)
            start += size
        self.size = start

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Named views of a host buffer; floats as float32."""
        floats = {name for name, is_float in SEQ_FIELDS if is_float}
        return {
            name: buffer[at].view(np.float32) if name in floats else buffer[at]
            for name, at in self.ranges.items()
        }

    def unpack(self, buffer: jax.Array) -> StepInput:
        """Take the buffer apart; called inside the jitted step."""
        shape = self.shape
        part = {
            name: jax.lax.slice(buffer, (at.start,), (at.stop,)) for name, at in self.ranges.items()
        }
        for name, is_float in SEQ_FIELDS:
            if is_float:
                part[name] = jax.lax.bitcast_convert_type(part[name], jnp.float32)
        ragged = RaggedBatch(
            cu_q_lens=part["cu_q_lens"],
            kv_lens=part["kv_lens"],
            seq_of_token=part["seq_of_token"],
            slots={GROUP: part["slots"]},
            page_table={GROUP: part["page_table"].reshape(shape.seqs, shape.pages)},
            state_slots=part["slot"],
            num_seqs=part["num_seqs"][0],
            decode_only=shape.decodes,
        )
        rows = SamplerRows(
            position=part["kv_lens"],
            **{name: part[name] for name, _ in SEQ_FIELDS if name not in ("kv_lens", "logits_at")},
        )
        return StepInput(part["token_ids"][None], ragged, part["logits_at"], rows)


class BatchBuilder:
    """Fills buffers.

    Args:
        page_size, num_pages: of the pool.
        num_slots: rows of the sampler's state; that number itself means "no row".
    """

    def __init__(self, *, page_size: int, num_pages: int, num_slots: int) -> None:
        self.page_size = page_size
        self.nowhere = num_pages * page_size
        self.num_slots = num_slots
        self._fields: dict[Shape, Fields] = {}

    def fields(self, shape: Shape) -> Fields:
        """The layout of a shape's buffer."""
        if shape not in self._fields:
            self._fields[shape] = Fields(shape)
        return self._fields[shape]

    def empty(self, shape: Shape) -> np.ndarray:
        """The buffer of a step without sequences (to compile with)."""
        return self.build(StepPlan(0, ()), {}, shape)

    def build(
        self,
        plan: StepPlan,
        requests: Mapping[str, Request],
        shape: Shape,
        adjusted: frozenset[str] = frozenset(),
    ) -> np.ndarray:
        """Write a plan into a new buffer (a device may still be reading the last one).

        Args:
            plan: the rows, in any order.
            requests: by id; their pages hold every token of the plan.
            shape: at least as large as the plan.
            adjusted: ids of requests that have a row in the sampler's state.

        Returns:
            int32 [fields(shape).size].
        """
        fields = self.fields(shape)
        buffer = np.zeros(fields.size, np.int32)
        at = fields.views(buffer)
        table = at["page_table"].reshape(shape.seqs, shape.pages)
        at["slots"][:] = self.nowhere
        at["seq_of_token"][:] = max(len(plan.rows) - 1, 0)
        at["slot"][:] = self.num_slots
        at["num_logprobs"][:] = -1
        at["top_p"][:] = 1.0
        at["repetition_penalty"][:] = 1.0
        filled = 0
        for i, row in enumerate(plan.rows):
            request, params = requests[row.request_id], requests[row.request_id].params
            end, stop = filled + row.count, row.start + row.count
            table[i, : len(request.pages)] = request.pages
            if row.count == 1:
                page, offset = divmod(row.start, self.page_size)
                at["slots"][filled] = request.pages[page] * self.page_size + offset
                at["token_ids"][filled] = request.tokens(row.start, stop)[0]
                at["seq_of_token"][filled] = i
            else:
                page, offset = np.divmod(np.arange(row.start, stop), self.page_size)
                at["slots"][filled:end] = table[i, page] * self.page_size + offset
                at["token_ids"][filled:end] = request.tokens(row.start, stop)
                at["seq_of_token"][filled:end] = i
            at["kv_lens"][i] = stop
            at["cu_q_lens"][i + 1] = filled = end
            at["logits_at"][i] = end - 1
            if not row.samples:
                continue
            if params.logprobs is not None:
                at["num_logprobs"][i] = params.logprobs
            if row.request_id in adjusted:
                at["slot"][i] = request.slot
                at["presence_penalty"][i] = params.presence_penalty
                at["frequency_penalty"][i] = params.frequency_penalty
                at["repetition_penalty"][i] = params.repetition_penalty
            if not params.greedy:
                at["seed"][i] = np.uint32(request.seed).view(np.int32)
                at["temperature"][i] = params.temperature
                at["top_k"][i] = max(params.top_k, 0)
                at["top_p"][i] = params.top_p
                at["min_p"][i] = params.min_p
        at["cu_q_lens"][len(plan.rows) + 1 :] = filled
        at["num_seqs"][0] = len(plan.rows)
        return buffer
