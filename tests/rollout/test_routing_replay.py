"""Training with recorded experts (`routing_replay`) and sampling masks."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from ed_elarge.engine.lending import LentEngine, get_records
from ed_elarge.engine.rollout import EngineRollout
from ed_esurge import EngineConfig
from ed_esurge.config import NOTHING, Records
from ed_infra.errors import ConfigError
from ed_models.families.mixtral import MixtralConfig, MixtralForCausalLM
from ed_trainers import arguments_class, trainer_class
from ed_trainers.figures.metrics import read_metrics
from ed_trainers.online.completions import Completions
from ed_trainers.online.sample_ledger import SampleLedger

from tests.rollout.asynchronous_runs import RUN, check_ledger, finish, run_with_kills, steps, write

MIXTRAL = RUN.replace("{model_type: llama,", "{model_type: mixtral, num_local_experts: 4,").replace(
    "trainer_type: grpo\n",
    "trainer_type: grpo\n  routing_replay: true\n  sampling_mask_replay: true\n  top_k: 9\n",
)
DIFFERENCE = "sampling/sampling_logp_difference/max"


class Batch(NamedTuple):
    input_ids: list[list[int]]


class Prompts:
    steps_per_epoch = 2

    def batch_at(self, step: int) -> Batch:
        random = np.random.default_rng(step)
        return Batch([random.integers(3, 250, random.integers(2, 9)).tolist() for _ in range(2)])


def small(completion_ids: list[list[int]]) -> list[float]:
    return [float(np.mean([token < 128 for token in ids])) for ids in completion_ids]


class ChangedExperts(EngineRollout):
    """Returns other experts than those that the engine used."""

    def generate(self, *args, **more):
        return [
            replace(one, experts=(one.experts + 1) % 4) for one in super().generate(*args, **more)
        ]


def train(folder, rollout=EngineRollout, *, records=None, method="grpo", **given):
    """Train a tiny Mixtral for two steps; return the rows of the record.

    The engine records what the arguments need, or `records`.
    """
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
        initializer_range=0.3,
        sharding_axis_dims=(1, 2, 2, 1, 1),
    )
    model = MixtralForCausalLM.create(config, seed=0)
    arguments = arguments_class(method)(
        save_directory=str(folder),
        total_batch_size=8,
        num_return_sequences=4,
        max_prompt_length=8,
        max_completion_length=8,
        max_training_steps=2,
        steps_per_generation=1,
        log_steps=1,
        learning_rate=0.02,
        use_tensorboard=False,
        do_last_save=False,
        progress_bar_type="none",
        **{"routing_replay": True, **given},
    )
    engine = LentEngine.of(
        model,
        None,
        EngineConfig(page_size=8, max_num_seqs=8),
        length=arguments.row_length,
        records=get_records(arguments) if records is None else records,
    )
    trainer = trainer_class(method)(
        arguments, model, Prompts(), rollout=rollout(engine), reward_functions=[small]
    )
    trainer.train()
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.nightly
def test_trainer_uses_the_experts_of_the_engine(tmp_path):
    rows = train(tmp_path / "recorded")
    assert len(rows) == 2 and rows[1]["kl"] > 0
    assert all(row[DIFFERENCE] < 1e-4 for row in rows)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)  # the reference uses them, too
    changed = train(tmp_path / "changed", ChangedExperts)
    assert changed[0][DIFFERENCE] > 0.1
    assert changed[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert changed[0]["clip_ratio/region_mean"] == 0  # the step repeats the numbers before it
    # Without the option, the trainer ignores the records.
    ignored = train(
        tmp_path / "ignored",
        ChangedExperts,
        records=Records(experts=True),
        routing_replay=False,
    )
    assert ignored[0][DIFFERENCE] < 1e-4


@pytest.mark.nightly
def test_rollout_without_experts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="routing_replay needs the experts of each token"):
        train(tmp_path, records=NOTHING)


@pytest.mark.nightly
def test_experts_pass_through_the_ledger(tmp_path):
    """Asynchronous runs without staleness equal one process, also after kills and as a replay."""
    text = MIXTRAL.replace("{model_type:", "{batch_invariant: true, model_type:")
    alone = finish(write(tmp_path / "alone", text=text))
    folder = write(tmp_path / "apart", "asynchronous: {max_staleness: 0, engines: 2}\n", text)
    run_with_kills(folder, 3, seed=1)
    assert [row["loss"] for row in steps(folder)] == [row["loss"] for row in alone]
    assert all(row[DIFFERENCE] < 1e-5 for row in steps(folder))
    check_ledger(folder)
    ledger = SampleLedger(folder / "run" / "samples.ledger", {})
    prompts = {n: content["prompts"] for kind, n, content in ledger.records() if kind == "issued"}
    for number, listed in prompts.items():
        for place in range(16):
            sample = ledger.sample((number, place))
            tokens = len(listed[place // 4]) // 4 + len(sample.token_ids) - 1
            assert sample.experts is not None
            assert sample.experts.shape == (tokens, 2, 2)
            assert sample.experts.min() >= 0 and sample.experts.max() < 4
            assert sample.masks is not None and len(sample.masks) == len(sample.token_ids)
            for token, mask in zip(sample.token_ids, sample.masks, strict=True):
                assert token in mask and len(mask) == 9
    ledger.close()


class ChangedMasks(EngineRollout):
    """Adds a token to each mask."""

    def generate(self, *args, **more):
        return [
            replace(one, masks=[np.union1d(mask, [7, 8]).astype(np.int32) for mask in one.masks])
            for one in super().generate(*args, **more)
        ]


@pytest.mark.nightly
@pytest.mark.parametrize("filters", [{"top_p": 0.7}, {"top_k": 5, "temperature": 0.7}], ids=str)
def test_trainer_uses_the_sampling_masks_of_the_engine(tmp_path, filters):
    given = {"routing_replay": False, "sampling_mask_replay": True, **filters}
    rows = train(tmp_path / "recorded", **given)
    assert len(rows) == 2
    assert all(row[DIFFERENCE] < 1e-4 for row in rows)
    assert all(0 < row["entropy"] < np.log(255) for row in rows)
    if "top_k" in filters:
        assert all(row["entropy"] <= np.log(5) for row in rows)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6) and rows[1]["kl"] > 0
    changed = train(tmp_path / "changed", ChangedMasks, **given)
    assert changed[0][DIFFERENCE] > 1e-3
    assert changed[0]["clip_ratio/region_mean"] == 0


def test_masks_are_bits_at_the_positions_that_predict_the_tokens():
    kept = [np.array([0, 31, 32], np.int32), np.zeros(0, np.int32), np.array([39], np.int32)]
    made = Completions(
        prompts=["a"],
        prompt_ids=[[5, 6]],
        completion_ids=[[31, 9, 39]],
        logprobs=[[0.0] * 3],
        completions=["b"],
        ended=[True],
        masks=[kept],
    ).token_masks(6, 40)
    assert made.shape == (1, 6, 2)
    assert made[0].view(np.uint32).tolist() == [
        [2**32 - 1] * 2,
        [2**31 + 1, 1],
        [2**32 - 1] * 2,  # an environment wrote this token
        [0, 2**7],
        *[[2**32 - 1] * 2] * 2,
    ]


@pytest.mark.nightly
def test_option_without_filters_is_refused(tmp_path):
    with pytest.raises(ValueError, match="set top_p, top_k or min_p"):
        train(tmp_path, sampling_mask_replay=True)
    with pytest.raises(ConfigError, match="sampling_mask_replay needs the tokens"):
        train(tmp_path, records=NOTHING, routing_replay=False, sampling_mask_replay=True, top_p=0.5)
