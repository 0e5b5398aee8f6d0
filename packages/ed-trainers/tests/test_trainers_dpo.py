"""DPO: packed pairs, microbatches and meshes agree; the reference model; the loss decreases."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.specs import LoraSpec
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import DPOArguments, trainer_class
from ed_trainers.arguments import idle_options
from ed_trainers.figures.metrics import read_metrics
from ed_trainers.losses.pairs import discount_tails, pair_batch
from ed_trainers.methods.reference_cache import REFERENCE_FILE
from flax import nnx
from method_runs import Pairs, apart, near, near_reports, one_step
from pydantic import ValidationError

DPOTrainer = trainer_class("dpo")
FIGURES = {
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    *("logps/chosen", "logps/rejected"),
}


@pytest.fixture(scope="module")
def batch():
    return Pairs(rows=8).batch_at(0)


@pytest.fixture
def step(toy):
    def step(batch, accumulation=1, dims=(1, 1, 1, 1, 1), **given):
        frozen = {"reference": toy.model(dims, seed=5)}
        return one_step("dpo", toy.model(dims), batch, accumulation, frozen, **given)

    return step


@pytest.mark.parametrize("accumulation", [8])
@pytest.mark.nightly
def test_accumulation_equals_the_big_batch(step, batch, accumulation):
    moved, report = step(batch)
    assert report.keys() >= FIGURES
    small, small_report = step(batch, accumulation)
    near(small, moved)
    near_reports(small_report, report)


@pytest.mark.daily("(2, 2, 1, 2, 1)")
@pytest.mark.parametrize("dims", [(2, 2, 1, 2, 1), (1, 2, 1, 1, 4)], ids=str)
def test_a_mesh_equals_one_device(step, batch, dims):
    moved, report = step(batch)
    many, many_report = step(batch, 1, dims)
    near(many, moved)
    near_reports(many_report, report)


@pytest.mark.nightly
def test_packed_dpo_step_matches_separate_rows(step, batch):
    moved, report = step(batch)
    alone, alone_report = step(apart(batch))
    near(alone, moved)
    near_reports(alone_report, report)


@pytest.mark.nightly
def test_chunked_dpo_loss_matches_unchunked_loss(step, batch):
    near(step(batch, lmhead_chunksize=7)[0], step(batch, lmhead_chunksize=4096)[0])


@pytest.mark.nightly
def test_rows_without_pairs_count_nowhere(step, batch):
    empty = {name: np.zeros_like(array) for name, array in batch.items()}
    more = {name: np.concatenate([array, empty[name]]) for name, array in batch.items()}
    near(step(more)[0], step(batch)[0])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("storage", "quantized"),
    [(True, False), (False, False), pytest.param(True, True, marks=pytest.mark.nightly)],
    ids=["scanned", "unrolled", "quantized"],
)
def test_the_reference_of_adapters_is_the_base_without_a_copy(batch, storage, quantized):
    def model():
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            scan_layers=storage,
            sharding_axis_dims=(1, 1, 1, 1, 1),
        )
        made = LlamaForCausalLM.create(config)
        return made.quantize({"dtype": "nf4", "group_size": 8}) if quantized else made

    def adapted():
        learner = model().apply_lora(LoraSpec(rank=2))
        state = nnx.state(learner, nnx.LoRAParam)
        learned = jax.tree.map(
            lambda x: x + 0.1 * np.cos(np.arange(x.size)).reshape(x.shape), state
        )
        nnx.update(learner, learned)
        return learner

    copied, report = one_step("dpo", adapted(), batch, frozen={"reference": model()})
    beneath, beneath_report = one_step("dpo", adapted(), batch)
    assert abs(report["rewards/margins"]) > 1e-3, "or the adapters change nothing"
    near(beneath, copied)
    near_reports(beneath_report, report)
    assert not DPOTrainer(DPOArguments(), adapted()).method.frozen.leaves


def test_the_learner_is_its_own_reference(toy, batch):
    _, report = one_step("dpo", toy.model(), batch)
    assert report["loss"] == pytest.approx(np.log(2)), "before the first step the ratios are 0"
    assert report["rewards/margins"] == 0


def test_reference_free_dpo_rejects_reference_model(toy, batch):
    _, report = one_step("dpo", toy.model(), batch, reference_free=True)
    scaled = 0.1 * report["logps/chosen"]
    assert report["rewards/chosen"] == pytest.approx(scaled, rel=1e-5)
    with pytest.raises(ConfigError, match="no reference is read"):
        one_step("dpo", toy.model(), batch, 1, {"reference": toy.model()}, reference_free=True)


def run(toy, path, model=None, **given):
    arguments = DPOArguments(
        **{
            "save_directory": str(path),
            "total_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "max_training_steps": 6,
            "learning_rate": 3e-3,
            "log_steps": 1,
            "use_tensorboard": False,
            "do_last_save": False,
            **given,
        }
    )
    held_out = Pairs(seed=9)
    held_out.steps_per_epoch = 2
    frozen = {"reference": toy.model(seed=5)}
    trainer = DPOTrainer(arguments, model or toy.model(), Pairs(), held_out, frozen=frozen)
    output = trainer.train()
    return trainer, output, read_metrics(path / "metrics.jsonl")


@pytest.mark.nightly
def test_log_probabilities_of_the_reference_ahead(toy, tmp_path):
    _, _, rows = run(toy, tmp_path / "live")
    trainer, _, ahead = run(toy, tmp_path / "ahead", precompute_ref_log_probs=True)
    assert not trainer.method.frozen.leaves, "the steps hold no reference"
    assert (tmp_path / "ahead" / REFERENCE_FILE).is_file()
    for live, known in zip(rows, ahead, strict=True):
        for name in ("loss", "rewards/margins", "eval_loss"):
            if name in live:
                # The first margins are rounding: differences of equal log-probabilities.
                assert known[name] == pytest.approx(live[name], rel=1e-5, abs=1e-8)

    # What is on disk is taken: a reference of other weights would be asked again.
    kept = np.load(tmp_path / "ahead" / REFERENCE_FILE)["values"]
    _, _, again = run(toy, tmp_path / "ahead", precompute_ref_log_probs=True, seed=42)
    assert np.array_equal(np.load(tmp_path / "ahead" / REFERENCE_FILE)["values"], kept)
    assert again[0]["loss"] == ahead[0]["loss"]
    stranger = Pairs(seed=77).batch_at(0)
    with pytest.raises(ConfigError, match="these answers are not in the data of the run"):
        trainer.prepare(stranger)


@pytest.mark.nightly
def test_the_held_out_margin_rises(toy, tmp_path):
    trainer, output, _ = run(toy, tmp_path, max_training_steps=30, learning_rate=2e-2, log_steps=30)
    start = DPOTrainer(
        trainer.arguments,
        toy.model(),
        None,
        trainer.eval_dataset,
        frozen={"reference": toy.model(seed=5)},
    ).evaluate()
    assert start["eval_rewards/accuracies"] < 0.7
    assert output.metrics["eval_rewards/accuracies"] > 0.9
    assert output.metrics["eval_rewards/margins"] > start["eval_rewards/margins"] + 0.5


def test_tokens_beyond_the_shorter_answer_are_discounted():
    pairs = pair_batch(Pairs(rows=2).batch_at(0))
    shares = discount_tails(pairs, 0.25)["token_shares"]
    segments, counted = pairs["segment_ids"], pairs["weights"] > 0
    for row in range(2):
        for segment in range(1, segments.max() + 1):
            of_pair = [
                shares[row, side][(segments[row, side] == segment) & counted[row, side]]
                for side in (0, 1)
            ]
            shared = min(map(len, of_pair))
            for own in of_pair:
                assert own.tolist() == [1.0] * shared + [0.25] * (len(own) - shared)
    assert (shares == 0.25).any(), "or no answer is longer than the other"
    assert (shares[~counted] == 1).all()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "given",
    [
        {"loss_type": "aot"},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.5, 2.0]},
        {"ld_alpha": 0.3, "use_weighting": True},
    ],
    ids=str,
)
def test_packed_pairs_and_meshes_equal_separate_rows_for_every_term(step, batch, given):
    moved, report = step(batch, **given)
    for other, dims in ((apart(batch), (1, 1, 1, 1, 1)), (batch, (2, 2, 1, 2, 1))):
        alone, alone_report = step(other, 1, dims, **given)
        near(alone, moved)
        near_reports(alone_report, report)
    if given["loss_type" if "loss_type" in given else "ld_alpha"] != "aot":
        small, small_report = step(batch, 4, **given)
        near(small, moved)
        near_reports(small_report, report)


def test_invalid_dpo_options_raise_error(toy):
    for given, words in [
        ({"loss_type": "sigmod"}, "did you mean 'sigmoid'"),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "no effect with loss_type hinge"),
        ({"loss_type": "exo", "label_smoothing": 0}, "above 0"),
        ({"label_smoothing": 0.5}, "less than 0.5"),
        ({"precompute_ref_log_probs": True, "reference_free": True}, "keep one"),
        ({"beta": 0}, "greater than 0"),
        ({"loss_type": ["sigmoid", "sigmod"]}, "did you mean 'sigmoid'"),
        ({"loss_type": ["sft", "sft"]}, "each loss once"),
        ({"loss_type": []}, "at least 1"),
        ({"loss_type": ["sft", "ipo"], "loss_weights": [1.0]}, "1 loss_weights for 2 losses"),
        ({"loss_type": "aot", "gradient_accumulation_steps": 2}, "in the whole step"),
        ({"loss_type": "aot", "use_weighting": True}, "no loss of each pair"),
        ({"loss_type": "nca", "f_divergence_type": "forward_kl"}, "use reverse_kl"),
        ({"ld_alpha": 0.5, "precompute_ref_log_probs": True}, "set one of the two"),
    ]:
        with pytest.raises(ValidationError, match=words):
            DPOArguments(**given)
    several = DPOArguments(loss_type=["exo", "sft"], loss_weights=[0.5, 2])
    assert several.losses == {"exo_pair": 0.5, "sft": 2.0}
    assert several.get_smoothing("exo_pair") == 1e-3 and several.get_smoothing("sft") == 0
    assert idle_options(DPOArguments(discopop_tau=0.1)) == [
        ("discopop_tau", "loss_type is sigmoid")
    ]
    assert not idle_options(DPOArguments(loss_type="discopop"))
    assert DPOArguments(loss_type="sppo").loss_type == "sppo_hard"
    batch = Pairs().batch_at(0)
    with pytest.raises(ConfigError, match="chosen_input_ids and rejected_input_ids"):
        pair_batch({"input_ids": batch["chosen_input_ids"]})
    with pytest.raises(ConfigError, match="same row"):
        pair_batch({**batch, **{n: v[:4] for n, v in batch.items() if n.startswith("rej")}})
