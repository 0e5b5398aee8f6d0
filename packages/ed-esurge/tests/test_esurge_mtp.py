"""Drafts of an MTP layer: the proposals of the definition, equal answers, and planted faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_esurge import SamplingParams, StructuredOutputs, eSurge
from ed_esurge.config import SpeculativeConfig
from ed_esurge.core.plan import PlanRow, StepPlan
from ed_esurge.core.request import Request
from ed_esurge.runner.draft_model import DraftModel
from ed_esurge.runner.mtp_drafts import MTPDrafts
from ed_infra.errors import ConfigError
from flax import nnx
from pydantic import ValidationError

pytestmark = pytest.mark.nightly
MOST, LENGTH = 3, 40
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "page_size": 8,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "compile_runner": False,
    "silent_mode": True,
}


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama(mtp_head="new")


@pytest.fixture(scope="module")
def engine(model, tokenizer):
    return start(model, tokenizer)


def start(model: Any, tokenizer: Any = None, **options: Any) -> eSurge:
    config = {"method": "mtp", "num_speculative_tokens": MOST, "adaptive_length": False}
    known = {"max_num_seqs": 4, "speculative_config": config, **OPTIONS}
    return eSurge(model, tokenizer, **{**known, **options})


class Definition:
    """The proposals for a sequence by forward passes over the whole sequence.

    Args:
        model: the served model.
        tokens: the tokens that the layer may propose; None = all.
    """

    def __init__(self, model: Any, tokens: Sequence[int] | None = None) -> None:
        graphdef, self._state = nnx.split(model)
        drafted = jnp.asarray(range(model.config.vocab_size) if tokens is None else tokens)

        def compute_hidden(state: Any, ids: jax.Array) -> Any:
            model = nnx.merge(graphdef, state)
            return model(ids, logits_at="none").last_hidden_state, model.model.embed(ids, None)

        def apply_layer(state: Any, embeds: jax.Array, hidden: jax.Array) -> Any:
            model = nnx.merge(graphdef, state)
            output = model.mtp(inputs_embeds=embeds, hidden=hidden).last_hidden_state
            return output, drafted[jnp.argmax(model.head()(output)[..., drafted], axis=-1)]

        self._hidden, self._layer = jax.jit(compute_hidden), jax.jit(apply_layer)

    def propose(self, tokens: Sequence[int]) -> list[int]:
        """Return `MOST` proposals after the tokens."""
        ids = np.zeros((1, LENGTH), np.int32)
        known = len(tokens)
        ids[0, :known] = tokens
        hidden, _ = self._hidden(self._state, ids)
        proposals: list[int] = []
        for length in range(known - 1, known - 1 + MOST):
            _, embeds = self._hidden(self._state, np.roll(ids, -1, axis=1))
            output, best = self._layer(self._state, embeds, hidden)
            proposals.append(int(best[0, length - 1]))
            ids[0, length + 1] = proposals[-1]
            hidden = hidden.at[0, length].set(output[0, length - 1])
        return proposals


@pytest.fixture(scope="module")
def definition(model):
    return Definition(model)


def check_proposals(
    engine: eSurge,
    definition: Definition,
    prompts: Sequence[list[int]],
    params: SamplingParams = GREEDY,
) -> int:
    """Compare all proposals of some requests with the definition; return their number."""
    proposer: Any = engine.loop.scheduler.proposer
    compared: list[bool] = []
    draft = proposer._draft

    def draft_and_compare(plan: StepPlan, requests: Any) -> None:
        draft(plan, requests)
        for name, (length, tokens) in proposer._drafts.items():
            known = [*requests[name].tokens(0, length)]
            if tokens and (name, length) not in seen:
                seen.add((name, length))
                compared.append(tokens == definition.propose(known)[: len(tokens)])

    seen = set[tuple[str, int]]()
    proposer._draft = draft_and_compare
    try:
        engine.generate([*prompts], params)
    finally:
        del proposer._draft
    assert all(compared), f"{compared.count(False)} of {len(compared)} proposals differ"
    return len(compared)


PROMPTS = [
    np.random.default_rng(i).integers(3, 250, length).tolist() for i, length in enumerate((5, 21))
]


def test_proposals_are_those_of_the_definition(engine, definition) -> None:
    """Also over chunks of a prompt, and for a single token of a prompt."""
    assert check_proposals(engine, definition, PROMPTS) > 15
    assert check_proposals(engine, definition, [[7], PROMPTS[0][:2]]) > 15


def reads_same_tokens(patch: pytest.MonkeyPatch) -> None:
    """Join a hidden state with its own token instead of the next one."""
    build = MTPDrafts._build_row

    def build_unshifted(self: MTPDrafts, request: Request, row: PlanRow, places: range, *more: Any):
        tokens = request.tokens(places.start, places.stop)
        return build(self, request, row, places, *more)._replace(token_ids=tokens)

    patch.setattr(MTPDrafts, "_build_row", build_unshifted)


def shifts_positions(patch: pytest.MonkeyPatch) -> None:
    """Store each pair at the position of its token."""
    build = MTPDrafts._build_row

    def build_later(self: MTPDrafts, *arguments: Any):
        row = build(self, *arguments)
        return row._replace(start=row.start + 1)

    patch.setattr(MTPDrafts, "_build_row", build_later)


def reads_hidden_state_before(patch: pytest.MonkeyPatch) -> None:
    """Read the hidden state of the token before."""
    build = MTPDrafts._build_row

    def build_stale(self: MTPDrafts, *arguments: Any):
        row = build(self, *arguments)
        return row._replace(features=[max(feature - 1, 0) for feature in row.features])

    patch.setattr(MTPDrafts, "_build_row", build_stale)


def keeps_hidden_states_of_the_model(patch: pytest.MonkeyPatch) -> None:
    """Repeat the layer with the hidden states of the model instead of its own."""

    def draft_with_model_states(self: MTPDrafts, plan: StepPlan, requests: Any) -> None:
        self._write_hidden(self._served)
        for _ in range(MOST):
            sampled = DraftModel._run(self, plan)
            rows: list[PlanRow] = []
            for stop, row in zip(
                np.cumsum([len(r.token_ids) for r in plan.rows]), plan.rows, strict=True
            ):
                if row.samples:
                    name, (token, *_) = row.request_id, sampled[row.request_id]
                    known = requests[name].num_tokens
                    self._drafts.setdefault(name, (known, []))[1].append(token)
                    rows.append(self._build_next(row, token, int(stop) - 1))
            if not rows:
                return
            plan = StepPlan(plan.step, tuple(rows))

    patch.setattr(MTPDrafts, "_draft", draft_with_model_states)


def keeps_old_hidden_states(patch: pytest.MonkeyPatch) -> None:
    """Do not read the hidden states of decode steps."""
    write = MTPDrafts._write_hidden

    def write_prompts(self: MTPDrafts, source: Any) -> None:
        if source is self.runner or source.hidden.shape[0] > source.buckets.max_rows:
            write(self, source)

    patch.setattr(MTPDrafts, "_write_hidden", write_prompts)


@pytest.mark.parametrize(
    "fault",
    [
        reads_same_tokens,
        shifts_positions,
        reads_hidden_state_before,
        keeps_hidden_states_of_the_model,
        keeps_old_hidden_states,
    ],
)
def test_planted_fault_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], engine, definition, monkeypatch
) -> None:
    fault(monkeypatch)
    engine.reset_prefix_cache()
    with pytest.raises(AssertionError, match="proposals differ"):
        check_proposals(engine, definition, PROMPTS)


@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_drafted_requests_have_the_answers_of_plain_decoding(
    max_num_seqs: int, model, tokenizer
) -> None:
    """Sampling, grammars, penalties and log-probabilities; the layer is a random one."""
    engine = start(model, tokenizer, max_num_seqs=max_num_seqs)
    proposer: Any = engine.loop.scheduler.proposer
    grammar = StructuredOutputs(regex="[ab]{4}c+d")
    params = [
        GREEDY.replace(logprobs=2),
        SamplingParams(seed=3, temperature=1.2, top_p=0.9, max_tokens=12, ignore_eos=True),
        SamplingParams(seed=4, temperature=1.0, max_tokens=12, structured_outputs=grammar),
        GREEDY.replace(frequency_penalty=0.7, prompt_logprobs=1),
    ]
    prompts = [*PROMPTS, PROMPTS[0], PROMPTS[1]]
    drafted = engine.generate(prompts[:2], params[:2]) + engine.generate(prompts[2:], params[2:])
    assert proposer.num_draft_tokens > 10
    assert not (proposer._computed or proposer._pages or proposer._drafts or proposer._starts)
    engine.loop.scheduler.proposer = None
    engine.reset_prefix_cache()
    for output, plain in zip(drafted, engine.generate(prompts, params), strict=True):
        one, two = output.outputs[0], plain.outputs[0]
        assert (one.token_ids, one.text) == (two.token_ids, two.text)
        assert one.finish_reason == two.finish_reason
        if one.logprobs is not None:
            assert one.cumulative_logprob == pytest.approx(two.cumulative_logprob, abs=1e-4)


def test_proposals_after_a_pause_are_those_of_the_definition(model, definition) -> None:
    """The layer computes the tokens of a pause when it drafts again, with their hidden states."""
    config = {"method": "mtp", "num_speculative_tokens": MOST}
    engine = start(model, speculative_config=config)
    proposer: Any = engine.loop.scheduler.proposer
    params = GREEDY.replace(max_tokens=30)
    assert check_proposals(engine, definition, PROMPTS[:1], params) > 4
    assert proposer.num_pauses > 0
    assert not proposer._waiting


@pytest.mark.parametrize("max_loras", [0, 1])
def test_new_weights_are_also_those_of_the_layer(max_loras: int, make_llama, tokenizer) -> None:
    """Copied and lent weights, after which the proposals are those of the new model."""
    old, new, lent = (make_llama(mtp_head="new", seed=seed) for seed in (0, 5, 6))
    engine = start(old, tokenizer, max_loras=max_loras)
    engine.generate(PROMPTS, GREEDY)
    draft: Any = engine.loop.scheduler.proposer
    engine.update_model_weights(new)
    assert check_proposals(engine, Definition(new), PROMPTS) > 15
    with engine.weights(lent):
        assert check_proposals(engine, Definition(lent), PROMPTS) > 15
    assert not draft.runner.weights.there
    engine.update_model_weights(new)
    engine.sleep(level=1)
    engine.wake_up()
    assert check_proposals(engine, Definition(new), PROMPTS) > 15


@pytest.mark.parametrize("is_tied", [False, True])
def test_short_head_proposes_the_best_of_the_frequent_tokens(
    is_tied: bool, make_llama, tokenizer
) -> None:
    """Without counts, of the first tokens. Also with new weights; answers are those of plain
    decoding."""
    old, new = (make_llama(mtp_head="new", tie_word_embeddings=is_tied, seed=s) for s in (0, 5))
    counts = np.random.default_rng(0).permutation(old.config.vocab_size)
    new.mtp.token_counts.set_value(jnp.asarray(counts, jnp.float32))
    config = {
        "method": "mtp",
        "num_speculative_tokens": MOST,
        "adaptive_length": False,
        "draft_vocab_size": 100,
    }
    engine = start(old, tokenizer, speculative_config=config)
    assert check_proposals(engine, Definition(old, range(100)), PROMPTS) > 15
    engine.update_model_weights(new)
    frequent = np.sort(np.argsort(counts)[-100:]).tolist()
    assert check_proposals(engine, Definition(new, frequent), PROMPTS) > 15
    drafted = engine.generate(PROMPTS, GREEDY)
    engine.loop.scheduler.proposer = None
    engine.reset_prefix_cache()
    plain = engine.generate(PROMPTS, GREEDY)
    assert [x.outputs[0].token_ids for x in drafted] == [x.outputs[0].token_ids for x in plain]


def test_unusable_size_of_the_draft_vocabulary_raises_error(model) -> None:
    config = {"method": "mtp", "draft_vocab_size": 1000}
    with pytest.raises(ConfigError, match="exceeds the vocabulary of 260 tokens"):
        start(model, speculative_config=config)
    with pytest.raises(ValidationError, match="no effect with method ngram"):
        SpeculativeConfig(method="ngram", draft_vocab_size=100)


def test_model_without_layer_raises_error(make_llama) -> None:
    with pytest.raises(ConfigError, match="mtp_head='stored'"):
        start(make_llama())
