"""ppo, gkd, xpo and nash_md: steps, the completions of each step, and saved values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import CheckpointError, ConfigError
from ed_infra.inputs import Inputs
from ed_infra.outputs import CausalLMOutput
from ed_infra.testing import tiny_llama
from ed_models.adapters.lora import has_lora
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import Models
from ed_trainers.arguments import arguments_class
from ed_trainers.losses.policy import (
    BONUS_ENTROPY,
    Policy,
    count_scored_rows,
    gamma_weights,
    select_near_completions,
    select_uncertain_tokens,
)
from ed_trainers.methods import grpo, nash_md
from ed_trainers.methods.cpo import shape_rewards
from ed_trainers.methods.gkd import is_on_policy, separate_conversations
from ed_trainers.online.entropy_control import EntropyControl
from ed_trainers.online.model_rollout import ModelRollout
from ed_trainers.online.phase import Phase
from ed_trainers.options.groups import GRPO_LOSSES
from ed_trainers.roles.value_head import NAME, VALUE_HEAD_FILE, value_head
from ed_trainers.rollout import Weights
from flax import nnx
from method_runs import StopAt, near, near_reports, rows_of
from online_runs import END, Batch, Prompts, ToyRollout, even, one_step, online, phase_of
from pydantic import ValidationError

DISTILLED = ("gkd", "on_policy_distillation", "sparse_distillation", "iw_opd")
METHODS = ("ppo", *DISTILLED, "xpo", "nash_md")
GIVEN = {
    "ppo": {"num_iterations": 2, "beta": 0.1},
    "gkd": {"rewards": (), "lmbda": 1.0},
    "on_policy_distillation": {"rewards": (), "temperature": 0.7},
    "sparse_distillation": {"rewards": (), "loss_top_k": 5, "temperature": 0.7},
    "iw_opd": {"rewards": (), "temperature": 0.7},
    "xpo": {"alpha": 0.1},
    "nash_md": {},
}


class Other(ToyRollout):
    """Samples from another toy model than the learner."""

    def __init__(self, run, make):
        super().__init__()
        self.run, self.make = run, make

    def generate(self, prompts, params, weights, *, seeds=None):
        frozen = self.run.frozen
        other = self.make(Models(weights.model, frozen.merge(frozen.leaves)))
        lent = Weights(*other.split_module(), version=weights.version)
        return super().generate(prompts, params, lent, seeds=seeds)


@pytest.fixture(autouse=True)
def toys_have_no_generate(monkeypatch):
    monkeypatch.setattr(Phase, "build_rollout", lambda self, make: Other(self.run, make))
    monkeypatch.setattr(nash_md, "build_opponent", lambda run, models: models["reference"])


@pytest.fixture(scope="module")
def toy(toy):
    return toy.model


def step(method, toy, dims=(1, 1, 1, 1, 1), accumulation=1, **given):
    role = "teacher" if method in DISTILLED else "reference"
    frozen = {role: toy(dims, seed=5)}
    if role == "teacher":
        # Toys of other seeds have nearly equal outputs, so the divergence would be mostly rounding.
        kernel = frozen["teacher"].kernel
        kernel.set_value(10 * kernel[...])
    return one_step(method, toy(dims), accumulation, frozen=frozen, **{**GIVEN[method], **given})


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
def test_microbatches_on_a_mesh_equal_one_batch_on_a_device(toy, method):
    moved, report = step(method, toy)
    assert max(np.max(np.abs(x)) for x in jax.tree.leaves(moved)) > 1e-4, "or nothing is tested"
    other, other_report = step(method, toy, (2, 2, 1, 2, 1), 2)
    near(other, moved, 2e-5)
    near_reports(other_report, report, 2e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("dims", "accumulation"),
    [((1, 1, 1, 1, 1), 8), ((8, 1, 1, 1, 1), 1), ((1, 8, 1, 1, 1), 1), ((1, 2, 1, 1, 4), 4)],
    ids=str,
)
def test_every_mesh_and_accumulation_equals_one_device(toy, method, dims, accumulation):
    moved, report = step(method, toy)
    other, other_report = step(method, toy, dims, accumulation)
    near(other, moved, 2e-5)
    near_reports(other_report, report, 2e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
def test_chunked_policy_loss_matches_unchunked_loss(toy, method):
    near(step(method, toy, lmhead_chunksize=7)[0], step(method, toy)[0], 2e-5)


# PPO and its value head.


@pytest.mark.nightly
def test_value_head_trains_resumes_and_is_saved_separately(toy, tmp_path):
    def run(directory, *callbacks, **given):
        options = {"num_iterations": 2, "num_train_epochs": 1, "learning_rate": 0.3, **given}
        model = toy()
        return model, online(
            "ppo", model, tmp_path / directory, generations=2, callbacks=callbacks, **options
        )

    model, whole = run("whole")
    assert not hasattr(model, NAME) and not hasattr(whole.model, NAME)
    output = whole.train()
    learned = dict(nnx.to_flat_state(output.state.graphstate))
    assert np.abs(learned[NAME, "kernel"][...]).max() > 0 < np.abs(learned[NAME, "bias"][...])
    # The model that the trainer was given has the new weights, and no head.
    assert not hasattr(model, NAME)
    np.testing.assert_array_equal(model.kernel[...], learned["kernel",][...])
    assert (tmp_path / "whole" / "model" / VALUE_HEAD_FILE).is_file()

    run("parts", StopAt(2))[1].train()
    again = run("parts")[1].train()
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    for a, b in zip(*(jax.tree.leaves(o.state.graphstate) for o in (again, output)), strict=True):
        np.testing.assert_array_equal(a, b)


def made(dims=(1, 1, 1, 1, 1)):
    fields = tiny_llama(num_hidden_layers=1, vocab_size=32, sharding_axis_dims=dims)
    del fields["model_type"]
    config = LlamaConfig(**{**fields, "eos_token_id": END, "pad_token_id": 0})
    return LlamaForCausalLM.create(config, seed=0)


@pytest.fixture
def llama():
    return made()


@pytest.mark.nightly
def test_adapters_and_the_head_learn_near_the_base_under_them(llama, tmp_path):
    model = llama.apply_lora_to_layers(2, seed=1)
    run = online("ppo", model, tmp_path, num_train_epochs=1, num_iterations=1, beta=0.1)
    run.method.rollout = ModelRollout(lambda learner: learner, rows=8)
    assert not run.method.frozen.leaves, "the base is no second copy"
    state = run.train().state
    names = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(state.graphstate)}
    assert names and all("lora" in name or name.startswith(NAME) for name in names)
    assert {f"{NAME}/kernel", f"{NAME}/bias"} <= names
    rows = rows_of(tmp_path)
    assert abs(rows[0]["objective/kl"]) < 1e-4 < abs(rows[-1]["objective/kl"])
    assert has_lora(run.model) and not hasattr(run.model, NAME)
    assert (tmp_path / "model" / VALUE_HEAD_FILE).is_file(), (
        "beside the model that the adapters are merged in"
    )


@pytest.mark.proves("value_head")
def test_a_saved_head_is_read(toy, tmp_path):
    first = online("ppo", toy(), tmp_path)
    kernel = value_head(first._model).kernel
    wanted = np.arange(kernel.shape[0], dtype=np.float32)[:, None]
    kernel.set_value(jax.numpy.asarray(wanted))
    first.save_model(tmp_path / "model")
    second = online("ppo", toy(), tmp_path, value_head=str(tmp_path / "model"))
    np.testing.assert_array_equal(value_head(second._model).kernel[...], wanted)
    with pytest.raises(CheckpointError, match=r"there is no .*value_head"):
        online("ppo", toy(), tmp_path, value_head=str(tmp_path))


def test_unscored_completions_have_no_loss_weight(toy, tmp_path):
    def half(completion_ids):
        return [None if i % 2 else 1.0 for i in range(len(completion_ids))]

    run = online("ppo", toy(), tmp_path, rewards=(half,))
    rows = phase_of(run).generate(run.feed.dataset.batch_at(0), run.weights(), 0).rows
    assert rows["weights"][::2].any(axis=1).all() and not rows["weights"][1::2].any()
    np.testing.assert_array_equal(rows["scored"], [1, 0] * 4)


def test_prompts_of_ppo_have_several_completions(toy, tmp_path):
    run = online("ppo", toy(), tmp_path, num_return_sequences=4)
    prompts = run.feed.dataset.batch_at(0)
    assert len(prompts) == 2
    rows = phase_of(run).generate(prompts, run.weights(), 0).rows
    starts = [
        row[: np.flatnonzero(weights)[0]]
        for row, weights in zip(rows["input_ids"], rows["weights"], strict=True)
    ]
    for start, expected in zip(starts, np.repeat(np.arange(2), 4), strict=True):
        np.testing.assert_array_equal(start, starts[4 * expected])
    assert not np.array_equal(starts[0], starts[4])


# Distillation.


@pytest.mark.nightly
def test_presets_of_gkd_are_gkd_and_a_support_of_all_tokens_is_the_vocabulary(toy):
    given = {"lmbda": 1.0, "beta": 1.0, "temperature": 1.0}
    left, right = step("on_policy_distillation", toy, temperature=1.0), step("gkd", toy, **given)
    near(left[0], right[0], 0)
    assert left[1] == right[1]
    for tail in (True, False):
        whole = step("sparse_distillation", toy, beta=1.0, loss_top_k=32, loss_add_tail=tail)
        near(whole[0], step("on_policy_distillation", toy)[0], 1e-4)
    few = step("sparse_distillation", toy, beta=1.0)
    assert abs(few[1]["loss"] - whole[1]["loss"]) > 1e-4


# GKD.


class Words:
    """A tokenizer of numbers."""

    eos_token_id = END

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


@pytest.mark.nightly
@pytest.mark.proves("lmbda", "seq_kd")
def test_gkd_options_select_source_of_completions(toy, tmp_path):
    frozen = {"teacher": toy(seed=5)}

    def run(**given):
        made = online("gkd", toy(), tmp_path, rewards=(), frozen=frozen, **given)
        made.method.tokenizer = Words()
        return made

    batch = Batch([[5, 6]] * 8, {"completion": ["7 8", [9, 10]] * 4})
    data = run(lmbda=0.0)
    rows = phase_of(data).generate(batch, data.weights(), 0).rows
    np.testing.assert_array_equal(rows["input_ids"][0], [5, 6, 7, 8, END, 0, 0])
    np.testing.assert_array_equal(rows["weights"][0], [0, 1, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(rows["input_ids"][1], [5, 6, 9, 10, 0, 0, 0])
    assert not data.method.rollout.versions

    taught = run(lmbda=0.0, seq_kd=True)
    lent = Weights(*frozen["teacher"].split_module(), version=0)
    alone = phase_of(taught).sample(batch, lent, number=0)
    made = phase_of(taught).complete(batch, taught.weights(), number=0)
    assert made.completion_ids == alone.completion_ids

    mixed = run(lmbda=0.5)
    drawn = [is_on_policy(mixed.method, number) for number in range(200)]
    assert 0.35 < np.mean(drawn) < 0.65 and drawn == [
        is_on_policy(run(lmbda=0.5).method, n) for n in range(200)
    ]
    on, off = drawn.index(True), drawn.index(False)
    assert phase_of(mixed).generate(batch, mixed.weights(), on).figures["on_policy"] == 1
    assert len(mixed.method.rollout.versions) == 1
    assert phase_of(mixed).generate(batch, mixed.weights(), off).figures["on_policy"] == 0
    assert len(mixed.method.rollout.versions) == 1

    with pytest.raises(ConfigError, match="write additional_fields"):
        phase_of(data).generate(Prompts(8).batch_at(0), data.weights(), 0)
    odd = Batch([[5]] * 8, {"completion": ["7", None] * 4})
    with pytest.raises(ConfigError, match="row 1 has the completion None"):
        phase_of(data).generate(odd, data.weights(), 0)


def test_last_answer_of_a_conversation_completes_its_prompt_in_gkd():
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "7 8"}]

    class Chats(Batch):
        prompts = (chat, "text", chat[:1])

        def with_prompt(self, number, prompt):
            return [number, len(prompt)]

    rows = separate_conversations(Chats([[5, 6]] * 3, {"name": [1, 2, 3]}))
    assert rows.prompts == [chat[:1], "text", chat[:1]]
    assert rows.input_ids == [[0, 1], [5, 6], [5, 6]]
    assert rows.fields == {"name": [1, 2, 3], "completion": ["7 8", None, None]}
    for unchanged in (Batch([[5, 6]], {}), Chats([[5, 6]] * 3, {"completion": ["1", "2", "3"]})):
        assert separate_conversations(unchanged) is unchanged


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.99])
def test_uncertain_tokens_are_those_above_the_quantile_of_numpy(share):
    random = np.random.default_rng(3)
    entropy, weights = random.random((4, 7), np.float32), random.integers(0, 2, (4, 7))
    bound = np.quantile(entropy[weights > 0], 1 - share)
    chosen = select_uncertain_tokens(jnp.asarray(entropy), jnp.asarray(weights, jnp.float32), share)
    np.testing.assert_array_equal(chosen, (entropy >= bound - 1e-7) & (weights > 0))
    nothing = select_uncertain_tokens(jnp.asarray(entropy), jnp.zeros((4, 7)), share)
    assert not nothing.any()


def test_gamma_weights_are_those_of_the_formula_in_float64():
    random = np.random.default_rng(4)
    ratios, corrections = random.normal(0, 0.3, (4, 5)), random.uniform(0.5, 1.5, (4, 5))
    mask = (np.arange(5) < [[5], [3], [1], [4]]).astype(np.float64)
    gains = np.array([[1.0], [0.0], [-1.0], [-0.1]])
    ratio = np.exp((ratios * mask).sum(-1) + (np.log(corrections) * mask).sum(-1))[:, None]
    power, decay = np.where(gains >= 0, 2.0, 3.0), np.where(gains >= 0, 3.0, 1.5)
    computed = gamma_weights(
        *(
            jnp.asarray(x, jnp.float32)
            for x in (ratios, np.where(mask, corrections, 1), gains, mask)
        ),
        positive=(2.0, 3.0),
        negative=(3.0, 1.5),
    )
    expected = np.exp(decay) * ratio**power * np.exp(-decay * ratio)
    np.testing.assert_allclose(computed, expected, rtol=2e-5)


def test_row_without_a_reward_has_no_tokens_and_is_not_present():
    rows = {"weights": np.ones((2, 3)), "present": np.ones(2), "scored": np.array([1.0, 0.0])}
    counted = count_scored_rows(Inputs(rows))
    assert counted["weights"].sum(-1).tolist() == [3, 0]
    assert counted["present"].tolist() == [1, 0]


@pytest.mark.nightly
@pytest.mark.parametrize("loss_type", GRPO_LOSSES)
def test_row_without_a_reward_counts_nowhere_in_the_policy_loss(loss_type):
    random = np.random.default_rng(6)
    arguments = arguments_class("grpo")(loss_type=loss_type, entropy_coef=0.1)
    rows = {
        name: jnp.asarray(random.uniform(0.5, 1.5, (4, 5)), jnp.float32)
        for name in ("old_logps", "reference_logps", "logps", "entropy")
    }
    weights = jnp.asarray(np.arange(5) < [[5], [2], [3], [4]], jnp.float32)
    scored = jnp.asarray([1.0, 0.0, 1.0, 0.0])
    rows |= {"weights": weights, "scored": scored, "rewards": scored, "present": jnp.ones(4)}
    rows |= {"advantages": jnp.asarray([0.5, 0.0, -0.5, 0.0]), "tokens": jnp.full(4, 4.0)}

    def compute(rows):
        batch = Inputs(rows)
        policy = Policy(batch["logps"], batch["entropy"])
        found = grpo.policy_loss(arguments, batch, CausalLMOutput(), policy)
        return {name: float(m.value) for name, m in {**found.sums, **found.metrics}.items()}

    of_scored = compute({name: array[::2] for name, array in rows.items()})
    assert compute(rows) == pytest.approx(of_scored, rel=1e-5)


def test_only_bad_completions_that_the_policy_left_do_not_count():
    drift = jnp.asarray([[0.9, 0.3, 0.0], [0.9, 0.3, 0.0], [0.1, 0.1, 0.0]])
    gains = jnp.asarray([[-1.0], [0.5], [-1.0]])
    counted = select_near_completions(drift, gains, jnp.asarray([2.0, 2.0, 2.0]), 0.5)
    np.testing.assert_array_equal(counted, [[0], [1], [1]])


def test_weight_of_entropy_follows_the_entropy_of_the_step_before():
    options = arguments_class("grpo")(
        use_adaptive_entropy=True,
        entropy_coef=0.1,
        entropy_target=1.0,
        entropy_coef_delta=0.04,
        entropy_coef_min=0.05,
        entropy_coef_max=0.15,
    )
    control = EntropyControl(options)
    assert control.weight == 0.0, "there is no entropy before the first step"
    weights = []
    for entropy in (0.9, 0.9, 1.1, 1.1, 1.1, 0.5):
        control.observe({BONUS_ENTROPY: jnp.asarray(entropy)})
        weights.append((control.weight, control.coefficient))
    expected = [(0.14, 0.14), (0.15, 0.15), (0, 0.11), (0, 0.07), (0, 0.05), (0.09, 0.09)]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    later = EntropyControl(options)
    later.load_state_dict(control.state_dict())
    assert (later.weight, later.coefficient) == (control.weight, control.coefficient)
    with pytest.raises(ValidationError, match="below entropy_coef_min"):
        arguments_class("grpo")(entropy_coef_min=0.5, entropy_coef_max=0.4)


def test_shape_of_rewards_of_cpo_is_that_of_alphapo():
    logps = jnp.asarray([-3.0, -0.5, 0.0])
    for alpha in (0.25, -0.5):
        expected = (1 - np.exp(logps) ** -alpha) / alpha
        np.testing.assert_allclose(shape_rewards(logps, alpha), expected, rtol=1e-6)
    assert shape_rewards(logps, 0.0) is logps


# XPO and Nash-MD.


@pytest.mark.proves("judge")
def test_a_judge_compares_both_completions(toy, tmp_path, monkeypatch):
    seen = []

    def judge(completion_ids, completions, others, wanted):
        seen.append((completion_ids, completions, others, wanted))
        return [1.0, 0.0, 0.5, 0.75] * 2

    monkeypatch.setattr("ed_trainers.rewards.reward_function", lambda name, folders: (name, judge))
    options = {"rewards": (), "judge": "module:judge"}
    run = online("xpo", toy(), tmp_path, **options)
    generation = phase_of(run).generate(run.feed.dataset.batch_at(0), run.weights(), 0)
    ((own, texts, others, wanted),) = seen
    assert own == texts != others and len(own) == len(others) == len(wanted) == 8
    rows = generation.rows
    assert rows["input_ids"].shape == (8, 2, 7)
    np.testing.assert_array_equal(rows["won"], [1, 0, 0, 1] * 2)
    np.testing.assert_array_equal(rows["lost"], [0, 1, 0, 0] * 2)
    for row, (first, second) in enumerate(zip(own, others, strict=True)):
        for side, ids in enumerate((first, second)):
            here = rows["weights"][row, side] > 0
            np.testing.assert_array_equal(rows["targets"][row, side][here], ids)
    run = online("nash_md", toy(), tmp_path, **options)
    rows = phase_of(run).generate(run.feed.dataset.batch_at(0), run.weights(), 0).rows
    np.testing.assert_array_equal(rows["wins"], [1, 0, 0.5, 0.75] * 2)


@pytest.mark.proves("missing_eos_penalty")
def test_truncated_completions_lose_missing_eos_penalty(toy, tmp_path):
    def one(completion_ids):
        return [1.0] * len(completion_ids)

    run = online("nash_md", toy(), tmp_path, rewards=(one,), missing_eos_penalty=3.0)
    batch, weights = run.feed.dataset.batch_at(0), run.weights()
    cut = [not ended for ended in phase_of(run).complete(batch, weights, number=0).ended]
    rows = phase_of(run).generate(batch, weights, 0).rows
    assert any(cut)
    np.testing.assert_array_equal(rows["rewards"], np.where(cut, -2.0, 1.0))


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["xpo", "nash_md"])
def test_adapters_compete_with_the_base_under_them(llama, tmp_path, monkeypatch, method):
    monkeypatch.undo()
    model = llama.apply_lora_to_layers(2, seed=1)
    base = jax.tree.map(np.array, nnx.state(model, nnx.Not(nnx.LoRAParam)))
    run = online(method, model, tmp_path, max_training_steps=2)
    run.method.rollout = ModelRollout(lambda learner: learner, rows=8)
    assert not run.method.frozen.leaves, "the base is no second copy"
    run.train()
    rows = rows_of(tmp_path)
    assert abs(rows[0]["objective/kl"]) < 1e-4 < abs(rows[1]["objective/kl"])
    after = nnx.state(run.model, nnx.Not(nnx.LoRAParam))
    jax.tree.map(np.testing.assert_array_equal, after, base)


@pytest.mark.nightly
def test_a_mixture_completes_the_same_prompts_alike_on_a_mesh(monkeypatch, tmp_path):
    monkeypatch.undo()

    def rows(dims):
        run = online("nash_md", made(dims), tmp_path, mixture_coef=0.3)
        run.method.rollout = ModelRollout(lambda learner: learner, rows=8)
        return phase_of(run).generate(run.feed.dataset.batch_at(0), run.weights(), 0).rows

    alone = rows((1, 1, 1, 1, 1))
    for name, array in rows((1, 2, 1, 2, 1)).items():
        np.testing.assert_allclose(array, alone[name], atol=1e-5, err_msg=name)


@pytest.mark.nightly
def test_models_complete_prompts_up_to_their_ends(llama):
    rollout = ModelRollout(lambda learner: learner, rows=4)
    weights = Weights(*llama.split_module(), version=3)
    prompts = [[5, 6, 7], [8], [9, 10], [11, 12], [13], [14, 15]]
    params = {"max_tokens": 24, "temperature": 2.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    first = rollout.generate(prompts, params, weights, seeds=range(6))
    assert [list(one.token_ids) for one in first] == [
        list(one.token_ids) for one in rollout.generate(prompts, params, weights, seeds=range(6))
    ]
    assert any(one.ended for one in first) and not all(one.ended for one in first)
    for prompt, one in zip(prompts, first, strict=True):
        assert one.ended == (one.token_ids[-1] == END) and END not in one.token_ids[:-1]
        assert one.weights_version == 3
        whole = np.asarray([[*prompt, *one.token_ids]])
        logits = llama(whole).logits[0, len(prompt) - 1 : -1]
        logps = jax.nn.log_softmax(logits / params["temperature"])
        chosen = np.asarray(logps)[np.arange(len(one.token_ids)), one.token_ids]
        np.testing.assert_allclose(one.logprobs, chosen, atol=1e-5)


def test_options_that_contradict_each_other():
    for method, given, words in [
        ("gkd", {"lmbda": 1.0, "seq_kd": True}, "seq_kd has no effect"),
        ("xpo", {"reward_functions": ["exact"], "judge": "a:b"}, "set one"),
        ("nash_md", {"judge": "a:b", "missing_eos_penalty": 1.0}, "a judge returns no scores"),
        ("xpo", {"loss_type": "ip"}, "did you mean 'ipo'"),
        ("ppo", {"kl_estimator": "k4"}, "known: k1, k2, k3"),
    ]:
        with pytest.raises(ValidationError, match=words):
            arguments_class(method)(**given)
    made = arguments_class("ppo")(num_ppo_epochs=3, num_mini_batches=2, kl_coef=0.0)
    assert (made.num_iterations, made.steps_per_generation) == (3, 2)
    assert not made.has_reference
    assert dict(arguments_class("ppo")(beta=0, kl_estimator="k3").idle())["kl_estimator"]


@pytest.mark.nightly
def test_ppo_requires_a_model_instead_of_a_state(toy, tmp_path):
    run = online("ppo", toy(), tmp_path)
    with pytest.raises(ConfigError, match="pass the model, not a state"):
        online("ppo", run._first_state(), tmp_path, rewards=(even,))
