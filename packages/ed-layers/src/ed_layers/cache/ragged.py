"""The flat batch of a serving step: the tokens of all sequences, concatenated.

Legend: T flat tokens (padded to a bucket), n sequence slots (padded), p pages per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedBatch:
    """The sequence of each flat token, and the location of its keys and values.

    Layers that free pages at different times (full attention, sliding window) have separate page
    tables: `slots` and `page_table` have an entry per group, "full" for ordinary attention.

    Attributes:
        cu_q_lens: tokens of sequence i are `cu_q_lens[i]:cu_q_lens[i+1]`; [n+1], constant at the
            end.
        kv_lens: length of each sequence *including* this step's tokens; [n], 0 for an empty slot.
        seq_of_token: sequence slot of each token; [T].
        slots: group -> `page * page_size + offset` of the token's keys and values; [T]. The index
            of padding tokens is outside the pool, so they are dropped.
        page_table: group -> page numbers of each sequence; [n, p].
        state_slots: slot of each sequence's recurrent state; [n].
        num_seqs: number of used slots of the n slots.
        decode_only: whether no sequence has more than one token (static). Attention then omits the
            code for longer sequences, which needs most of the compile time.
        prompt_lens: number of tokens of each sequence's prompt, computed or not; [n]. Rotary
            factors that depend on the length use these lengths (`ed_models.body.context`). None =
            `kv_lens`.
        adapter_ids: index of each sequence's LoRA adapter, 0 = none; [n]. None = no adapters.
        ahead: number of later tokens of the sequence that each token attends to; [T]. These tokens
            are part of the same step. None = 0.
        state_targets: slot that receives each sequence's recurrent state after the step; [n].
            None = `state_slots`.
        of_states: the batch for recurrent layers, if it differs; see `merge_lines`. Without pages.
    """

    cu_q_lens: Int[Array, " n1"]
    kv_lens: Int[Array, " n"]
    seq_of_token: Int[Array, " T"]
    slots: dict[str, Int[Array, " T"]]
    page_table: dict[str, Int[Array, "n p"]]
    state_slots: Int[Array, " n"]
    num_seqs: Int[Array, ""]
    decode_only: bool = field(default=False, metadata={"static": True})
    prompt_lens: Int[Array, " n"] | None = None
    adapter_ids: Int[Array, " n"] | None = None
    ahead: Int[Array, " T"] | None = None
    state_targets: Int[Array, " n"] | None = None
    of_states: RaggedBatch | None = None

    @property
    def q_lens(self) -> Int[Array, " n"]:
        """Number of tokens of each sequence in this step."""
        return jnp.diff(self.cu_q_lens)

    def get_group(self, name: str) -> str:
        """Return the group whose slots and pages a cache of this name uses: its own group if
        present, otherwise "full".

        A scheduler that frees no page before a sequence ends needs one page table for all layers.
        """
        return name if name in self.page_table else "full"

    def positions(self) -> Int[Array, "1 T"]:
        """Position of each token in its sequence; 0 for padding."""
        seq = jnp.clip(self.seq_of_token, 0, self.kv_lens.shape[0] - 1)
        offset = jnp.arange(self.seq_of_token.shape[0]) - self.cu_q_lens[seq]
        position = (self.kv_lens - self.q_lens)[seq] + offset
        return jnp.where(self.real(), position, 0)[None].astype(jnp.int32)

    def adapter_of_token(self) -> Int[Array, "1 T"] | None:
        """`adapter_ids` of each token."""
        if self.adapter_ids is None:
            return None
        seq = jnp.clip(self.seq_of_token, 0, self.kv_lens.shape[0] - 1)
        return self.adapter_ids[seq][None]

    def with_states(
        self, sources: Int[Array, " n"], targets: Int[Array, " n"], *, merge: bool
    ) -> RaggedBatch:
        """Return the batch with separate slots of the states before and after the step.

        Args:
            sources, targets: slots of the states that recurrent layers read and write.
            merge: whether recurrent layers merge consecutive entries with equal `state_slots`: the
                tokens of one sequence, each with an entry of its own. Attention computes such
                tokens in parallel, and a recurrence one after another.
        """
        if not merge:
            of_states = replace(self, state_slots=sources, state_targets=targets)
            return replace(self, of_states=replace(of_states, slots={}, page_table={}))
        n = self.kv_lens.shape[0]
        index = jnp.arange(n)
        begins = (self.state_slots != jnp.roll(self.state_slots, 1)) | (index == 0)
        begins |= index >= self.num_seqs
        row = jnp.cumsum(begins, dtype=jnp.int32) - 1
        # Entry of each row: its first, and for lengths its last.
        first = jnp.zeros(n, jnp.int32).at[jnp.where(begins, row, n)].set(index, mode="drop")
        lengths = jnp.zeros(n, jnp.int32).at[row].max(self.kv_lens)
        ends = jnp.zeros(n, jnp.int32).at[row].max(self.cu_q_lens[1:])
        count = jnp.where(self.num_seqs > 0, row[jnp.maximum(self.num_seqs - 1, 0)] + 1, 0)
        ends = jnp.where(index < count, ends, self.cu_q_lens[-1])

        def take(values: Int[Array, " n"] | None) -> Int[Array, " n"] | None:
            return None if values is None else values[first]

        of_states = RaggedBatch(
            cu_q_lens=jnp.concatenate([self.cu_q_lens[:1], ends]),
            kv_lens=lengths,
            seq_of_token=row[jnp.clip(self.seq_of_token, 0, n - 1)],
            slots={},
            page_table={},
            state_slots=sources[first],
            num_seqs=count,
            prompt_lens=take(self.prompt_lens),
            adapter_ids=take(self.adapter_ids),
            state_targets=targets[first],
        )
        return replace(self, of_states=of_states)

    def real(self) -> Bool[Array, " T"]:
        """Whether each token belongs to a sequence; padding comes last."""
        return jnp.arange(self.seq_of_token.shape[0]) < self.cu_q_lens[-1]
