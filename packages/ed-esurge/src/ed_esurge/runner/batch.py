"""Packing of a `StepPlan` into one flat buffer, and unpacking on the device.

A step has about twenty small inputs. Separate transfers are expensive, so the inputs are sent as
one int32 array (floats as their bits). The jitted step slices the array, which is free.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from ed_layers.cache import RaggedBatch

from ed_esurge.core.plan import PlanRow, StepPlan
from ed_esurge.runner.buckets import StepShape
from ed_esurge.runner.row_numbers import (
    NO_PROPOSAL,
    OF_ROW,
    OF_SEQUENCE,
    OF_STEP,
    split_columns,
)
from ed_esurge.runner.slots import SlotTables


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["token_ids", "ragged", "logits_at", "rows", "num_steps", "features", "positions"],
    meta_fields=[],
)
@dataclass(frozen=True)
class StepInput:
    """The arrays of a step, on the device.

    Attributes:
        token_ids: [1, T].
        ragged: assignment of the tokens to sequences and pages.
        logits_at: flat index of each sequence's last token; [n].
        rows: numbers of each row by `OF_STEP`, for the sampler; int32 [k, n].
        num_steps: number of decode steps of the plan.
        features: row of the table of encoder outputs for each token, or -1; [1, T]. None = the
            step reads no encoder outputs.
        positions: rotary positions along time, height and width; [3, 1, T]. None = the numbers of
            the tokens.
    """

    token_ids: jax.Array
    ragged: RaggedBatch
    logits_at: jax.Array
    rows: jax.Array
    num_steps: jax.Array
    features: jax.Array | None = None
    positions: jax.Array | None = None


class Fields:
    """Offsets of the arrays in the buffer of a shape.

    Args:
        groups: names of the page groups.
        featured: whether tokens may have encoder outputs.
        has_axes: whether tokens have rotary positions along several axes.
        drafts: whether rows have separate slots of the recurrent state before and after the step.
    """

    def __init__(
        self,
        shape: StepShape,
        groups: tuple[str, ...],
        featured: bool = False,
        has_axes: bool = False,
        drafts: bool = False,
    ) -> None:
        self.shape, self.groups, self.featured = shape, groups, featured
        self.drafts = drafts
        self.shapes: dict[str, tuple[int, ...]] = {
            "token_ids": (shape.tokens,),
            "seq_of_token": (shape.tokens,),
            "slots": (len(groups), shape.tokens),
            "rows": (len(OF_STEP), shape.seqs),
            "cu_q_lens": (shape.seqs + 1,),
            "num_seqs": (1,),
            "num_steps": (1,),
            "page_table": (len(groups), shape.seqs, shape.pages),
        }
        if featured:
            self.shapes["features"] = (1, shape.tokens)
        if has_axes:
            self.shapes["positions"] = (3, 1, shape.tokens)
        self.ranges: dict[str, slice] = {}
        self.size = 0
        for name, dims in self.shapes.items():
            self.ranges[name] = slice(self.size, self.size + int(np.prod(dims)))
            self.size = self.ranges[name].stop

    def view(self, buffer: np.ndarray, name: str) -> np.ndarray:
        """Return a view of one array of a host buffer."""
        return buffer[self.ranges[name]].reshape(self.shapes[name])

    def unpack(self, buffer: jax.Array) -> StepInput:
        """Unpack the buffer. Called inside the jitted step."""
        part = {
            name: jax.lax.slice(buffer, (at.start,), (at.stop,)).reshape(self.shapes[name])
            for name, at in self.ranges.items()
        }
        row = split_columns(part["rows"], OF_STEP)
        ragged = RaggedBatch(
            cu_q_lens=part["cu_q_lens"],
            kv_lens=row["kv_lens"],
            seq_of_token=part["seq_of_token"],
            slots=dict(zip(self.groups, part["slots"], strict=True)),
            page_table=dict(zip(self.groups, part["page_table"], strict=True)),
            state_slots=row["state_slots"],
            num_seqs=part["num_seqs"][0],
            decode_only=self.shape.decodes,
            prompt_lens=row["prompt_lens"],
            adapter_ids=row["adapter_ids"],
        )
        if self.drafts:
            merge = self.shape.drafts or not self.shape.decodes
            sources, targets = row["state_sources"], row["state_targets"]
            ragged = ragged.with_states(sources, targets, merge=merge)
        token_ids, features = part["token_ids"][None], part.get("features")
        positions = part.get("positions")
        return StepInput(
            *(token_ids, ragged, row["logits_at"], part["rows"], part["num_steps"][0]),
            features=features,
            positions=positions,
        )


class BatchBuilder:
    """Fills buffers.

    Args:
        slots: tables of the sequences.
        separate_rows: whether every token has a separate row on the device, as in decoding.
        page_size: number of tokens in a page.
        num_pages: number of pages of each group's pool. The slot after the last page is out of
            range, so that writes to it are dropped.
        featured: shapes whose tokens may have encoder outputs.
        has_axes: whether tokens have rotary positions along several axes.
        drafts: whether a recurrent model verifies drafts; see `Fields`.
    """

    def __init__(
        self,
        slots: SlotTables,
        *,
        page_size: int,
        num_pages: dict[str, int],
        separate_rows: bool = False,
        featured: Collection[StepShape] = (),
        has_axes: bool = False,
        drafts: bool = False,
    ) -> None:
        self._featured, self._has_axes, self._drafts = featured, has_axes, drafts
        self.page_size, self.apart = page_size, separate_rows
        self.nowhere = {group: pages * page_size for group, pages in num_pages.items()}
        self._slots = slots
        self._fields: dict[StepShape, Fields] = {}
        self._decodes: dict[tuple[StepShape, int], tuple[np.ndarray, np.ndarray]] = {}

    def fields(self, shape: StepShape) -> Fields:
        """Return the layout of a shape's buffer."""
        if shape not in self._fields:
            featured = shape in self._featured
            groups = tuple(self.nowhere)
            self._fields[shape] = Fields(shape, groups, featured, self._has_axes, self._drafts)
        return self._fields[shape]

    def empty(self, shape: StepShape) -> np.ndarray:
        """Return the buffer of a step without sequences, for compilation."""
        return self.build(StepPlan(0, ()), shape)[0]

    def build(self, plan: StepPlan, shape: StepShape) -> tuple[np.ndarray, Sequence[int]]:
        """Write a plan into a new buffer. The device may still read the previous buffer.

        Args:
            plan: the rows, in any order; `SlotTables.start` and `SlotTables.grow` have processed
            them.
            shape: a shape that fits the plan.

        Returns:
            int32 [fields(shape).size], and for each row of the plan the index of its first sampled
            row on the device.
        """
        fields, slot_tables = self.fields(shape), self._slots
        planned, places = plan.rows, range(len(plan.rows))
        tokens, apart = plan.total, self.apart or shape.drafts
        if tokens != len(planned) and (apart or plan.lines != len(planned)):
            planned, places = self._separate(planned, apart)
        count, nobody = len(planned), slot_tables.num_slots
        buffer = np.empty(fields.size, np.int32)
        starts = np.array([row.start for row in planned], np.int32)
        lengths: int | np.ndarray = 1
        if tokens == count:
            # The assignment of tokens to rows is the same in every decode step of this size.
            if (shape, count) not in self._decodes:
                frame = self._frame(fields, np.ones(count, np.int32))
                self._decodes[shape, count] = frame, np.arange(count)
            frame, token_rows = self._decodes[shape, count]
            token_ids = [row.token_ids[0] for row in planned]
            positions = starts
        else:
            lengths = np.array([len(row.token_ids) for row in planned], np.int32)
            frame = self._frame(fields, lengths)
            token_ids = [token for row in planned for token in row.token_ids]
            token_rows = np.arange(count).repeat(lengths)
            offsets = lengths.cumsum() - lengths
            positions = np.arange(tokens) + (starts - offsets)[token_rows]
        buffer[: frame.size] = frame
        buffer[:tokens] = token_ids
        fields.view(buffer, "num_steps")[0] = plan.steps

        padding = [nobody] * (shape.seqs - count)
        row_slots = np.array([row.slot for row in planned] + padding)
        rows, edge = fields.view(buffer, "rows"), len(OF_ROW) + len(OF_SEQUENCE)
        rows[0, :count] = starts + lengths
        rows[2:4], rows[4] = row_slots, NO_PROPOSAL
        if self._drafts:
            for index, row in enumerate(planned):
                if row.states is not None:
                    rows[2:4, index] = row.states
        for index, token in slot_tables.get_proposals(plan.rows, places):
            rows[4, index] = token
        slot_tables.numbers.take(row_slots, axis=1, out=rows[len(OF_ROW) :], mode="clip")
        idle = [index for index, row in enumerate(planned) if not row.samples]
        if idle:
            rows[edge:, idle] = slot_tables.numbers[len(OF_SEQUENCE) :, nobody:]

        page = positions // self.page_size
        inside = positions - page * self.page_size
        tables, slots = fields.view(buffer, "page_table"), fields.view(buffer, "slots")
        for group, table, group_slots in zip(self.nowhere, tables, slots, strict=True):
            slot_tables.page_table[group].take(row_slots, axis=0, out=table, mode="clip")
            group_slots[:tokens] = table[token_rows, page] * self.page_size + inside
        if fields.featured:
            _write_features(planned, fields.view(buffer, "features")[0])
        if self._has_axes:
            axes = fields.view(buffer, "positions")[:, 0]
            axes[:, tokens:] = 0
            axes[:, :tokens] = slot_tables.rotary_positions(row_slots[token_rows], positions)
        return buffer, places

    @staticmethod
    def _separate(planned: Sequence[PlanRow], apart: bool) -> tuple[list[PlanRow], list[int]]:
        """Split rows into one row for the known tokens, and one row for each proposal.

        Args:
            planned: the rows of a plan.
            apart: whether each known token has a row, too.

        Returns:
            the rows, and for each row of the plan the index of its first sampled row.
        """
        lines: list[PlanRow] = []
        places: list[int] = []
        for row in planned:
            if not apart and row.samples <= 1:
                places.append(len(lines))
                lines.append(row)
                continue
            last = len(row.token_ids) - max(row.samples, 1)  # index of the last known token
            places.append(len(lines) + (last if apart else 0))
            ends = [index + 1 for index in range(0 if apart else last, len(row.token_ids))]
            for first, end in zip([0, *ends], ends, strict=False):
                line = row._replace(start=row.start + first, token_ids=row.token_ids[first:end])
                samples = int(row.samples > 0 and end > last)
                features = row.features[first:end]
                lines.append(line._replace(pages={}, samples=samples, features=features))
        return lines, places

    def _frame(self, fields: Fields, lengths: np.ndarray) -> np.ndarray:
        """Return the part of a buffer that depends only on the lengths of the rows."""
        frame = np.zeros(fields.ranges["page_table"].start, np.int32)
        ends, count = lengths.cumsum(dtype=np.int32), len(lengths)
        total = int(ends[-1]) if count else 0
        token_rows = fields.view(frame, "seq_of_token")
        token_rows[:] = max(count - 1, 0)
        token_rows[:total] = np.arange(count).repeat(lengths)
        for places, nowhere in zip(fields.view(frame, "slots"), self.nowhere.values(), strict=True):
            places[:] = nowhere
        logits_at = fields.view(frame, "rows")[1]
        logits_at[:count], logits_at[count:] = ends - 1, fields.shape.tokens - 1
        borders = fields.view(frame, "cu_q_lens")
        borders[1 : count + 1] = ends
        borders[count + 1 :] = total
        fields.view(frame, "num_seqs")[0] = count
        return frame


def _write_features(planned: Sequence[PlanRow], features: np.ndarray) -> None:
    features[:] = -1
    at = 0
    for row in planned:
        if row.features:
            features[at : at + len(row.features)] = row.features
        at += len(row.token_ids)
