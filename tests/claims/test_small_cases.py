"""Small cases of claims whose full tests are nightly; tests/architecture/claims.toml lists them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_elarge.command.runs import run_file
from ed_elarge.engine.rollout import EngineRollout
from ed_esurge import EngineConfig, SamplingParams, eSurge
from ed_infra.specs import (
    KEPT_CODES,
    QUANTIZATION_FORMATS,
    EasyDeLQuantizationConfig,
    LoraSpec,
)
from ed_infra.testing import tiny_llama
from ed_layers.losses import cross_entropy_sum
from ed_layers.native import library
from ed_layers.quantization.model import dequantize
from ed_models.adapters.lora import lora_layers
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import arguments_class, trainer_class
from ed_trainers.figures.metrics import read_metrics
from flax import nnx

from tests.rollout.asynchronous_runs import RUN, check_ledger, finish, write
from tests.rollout.asynchronous_runs import steps as list_steps

LENGTH, STEPS = 12, 2
needs_library = pytest.mark.skipif(
    library.level() is None, reason="not built: python -m ed_layers.native build"
)


def create(**fields) -> LlamaForCausalLM:
    """Create a Llama with one layer on one device."""
    given = tiny_llama(**{"num_hidden_layers": 1, "sharding_axis_dims": (1, 1, 1, 1, 1), **fields})
    del given["model_type"]
    return LlamaForCausalLM.create(LlamaConfig(**given), seed=0)


def adapt(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Add adapters that change the output strongly."""
    model = model.apply_lora(LoraSpec(rank=2, alpha=4.0), seed=1)
    for i, (_, layer) in enumerate(lora_layers(model)):
        key = jax.random.fold_in(jax.random.key(0), i)
        layer.lora_b.set_value(0.3 * jax.random.normal(key, layer.lora_b.shape))
    return model


def draw(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(3, 256, (4, LENGTH)).astype(np.int32)


class Prompts(NamedTuple):
    input_ids: list[list[int]]


class Rows:
    """A loader of packed rows, of pairs, or of prompts."""

    steps_per_epoch = STEPS

    def __init__(self, method: str):
        self.method = method

    def batch_at(self, step: int) -> dict[str, np.ndarray] | Prompts:
        ids = draw(step)
        places = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape)
        if self.method == "grpo":
            return Prompts(ids[:2, :5].tolist())
        row = {"input_ids": ids, "labels": np.where(places > 3, ids, -100)}
        row |= {"segment_ids": np.ones_like(ids), "position_ids": places}
        if self.method == "sft":
            return row
        ids = draw(step + STEPS)
        other = {**row, "input_ids": ids, "labels": np.where(places > 3, ids, -100)}
        sides = {"chosen": row, "rejected": other}
        return {f"{side}_{name}": x for side, of in sides.items() for name, x in of.items()}


def train(folder, model, method: str, **given) -> list[dict]:
    """Train for two steps and return the rows of the record."""
    arguments = arguments_class(method)(
        save_directory=str(folder),
        total_batch_size=8 if method == "grpo" else 4,
        max_training_steps=STEPS,
        log_steps=1,
        learning_rate=0.01,
        use_tensorboard=False,
        do_last_save=False,
        progress_bar_type="none",
        **given,
    )
    if method == "grpo":
        rollout = EngineRollout.of(
            model, None, EngineConfig(page_size=8, max_num_seqs=8), length=arguments.row_length
        )
        roles = {
            "rollout": rollout,
            "reward_functions": [lambda completion_ids: [float(ids[0]) for ids in completion_ids]],
            "train_dataset": Rows(method),
        }
    else:
        roles = {"train_dataset": Rows(method)}
    trainer_class(method)(arguments, model=model, **roles).train()
    return [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


@pytest.mark.daily("sft")
@needs_library
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_training_with_batch_invariant_has_the_losses_without_it(tmp_path, method) -> None:
    """The second loss contains the gradient of the first step."""
    rows = {
        invariant: train(
            tmp_path / str(invariant),
            create(batch_invariant=invariant, scan_layers=method == "sft"),
            method,
        )
        for invariant in (True, False)
    }
    losses = {invariant: [row["loss"] for row in found] for invariant, found in rows.items()}
    assert len(losses[True]) == STEPS and losses[True][0] != losses[True][1]
    np.testing.assert_allclose(losses[True], losses[False], rtol=2e-5)
    norms = [[row["grad_norm"] for row in rows[invariant]] for invariant in (True, False)]
    np.testing.assert_allclose(*norms, rtol=2e-4)


@needs_library
def test_engine_and_training_of_adapters_over_codes_have_equal_bits(tmp_path) -> None:
    model = create(batch_invariant=True, scan_layers=True)
    model = adapt(model.quantize(EasyDeLQuantizationConfig("nf4", group_size=32)))
    options = {"num_return_sequences": 4, "max_prompt_length": 5, "max_completion_length": 5}
    for row in train(tmp_path, model, "grpo", beta=0.0, temperature=0.7, **options):
        assert row["sampling/sampling_logp_difference/max"] == 0
        assert row["sampling/importance_sampling_ratio/min"] == 1
        assert row["sampling/importance_sampling_ratio/max"] == 1


@needs_library
def test_asynchronous_run_without_staleness_equals_one_process(tmp_path, monkeypatch) -> None:
    """The run of one process is in the process of the test."""
    text = RUN.replace("{model_type:", "{batch_invariant: true, model_type:")
    text = text.replace("num_hidden_layers: 2", "num_hidden_layers: 1")
    text = text.replace("max_training_steps: 8", f"max_training_steps: {STEPS}")
    text = text.replace("max_completion_length: 24", "max_completion_length: 8")
    monkeypatch.chdir(write(tmp_path / "alone", text=text))
    assert run_file("run.yaml") == 0
    alone = list_steps(tmp_path / "alone")
    apart = finish(write(tmp_path / "apart", "asynchronous: {max_staleness: 0}\n", text))
    assert len(apart) == STEPS and apart == alone
    check_ledger(tmp_path / "apart", generations=STEPS)


def test_served_adapter_has_the_tokens_of_the_merged_model() -> None:
    model, prompts = create(), [draw(0)[0].tolist()] * 2
    options = {"max_num_seqs": 2, "page_size": 8, "max_model_len": 32, "compile_runner": False}
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def sample(engine: eSurge, **names) -> list[list[int]]:
        outputs = engine.generate(prompts, greedy, **names)
        engine.terminate()
        return [output.outputs[0].token_ids for output in outputs]

    engine = eSurge(model, max_loras=1, max_lora_rank=2, silent_mode=True, **options)
    engine.load_lora_adapter("one", adapt(model))
    plain, served = sample(engine, lora_name=[None, "one"])
    merged = adapt(model).unwrap_lora_to_layers()
    assert served == sample(eSurge(merged, silent_mode=True, **options))[0] != plain


#: Formats of the matrices of a layer: without and with codes of activations.
FORMATS = {
    "weights": dict(
        zip(
            ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"),
            ("nf4", "int8", "int4", "fp8", "mxfp8", "mxfp4"),
            strict=True,
        )
    ),
    "activations": {"self_attn": "w8a8", "mlp": "w4a8"},
}


@pytest.mark.daily("activations")
@pytest.mark.parametrize("kind", FORMATS)
def test_adapters_train_over_each_quantized_format(kind) -> None:
    """They have the gradients over the decoded weights; with codes of activations, nearly."""
    listed = [form for forms in FORMATS.values() for form in forms.values()]
    assert sorted(listed) == sorted(QUANTIZATION_FORMATS.keys() - {*KEPT_CODES})
    rules = [(name, EasyDeLQuantizationConfig(form)) for name, form in FORMATS[kind].items()]
    codes = adapt(create().quantize(rules))
    ids = jnp.asarray(draw(0))

    def differentiate(model: LlamaForCausalLM) -> list[np.ndarray]:
        graphdef, adapters, rest = model.split_module()

        def loss(adapters: nnx.State) -> jax.Array:
            model = nnx.merge(graphdef, adapters, rest)
            hidden = model(input_ids=ids[:, :-1], logits_at="none").last_hidden_state
            flat, targets = hidden.reshape(-1, hidden.shape[-1]), ids[:, 1:].reshape(-1)
            return cross_entropy_sum(flat, model.head(), targets, jnp.ones(len(targets)))

        return [np.asarray(x) for x in jax.tree.leaves(jax.jit(jax.grad(loss))(adapters))]

    gradients, expected = differentiate(codes), differentiate(dequantize(codes))
    limit = 0.2 if kind == "activations" else 1e-4
    assert len(gradients) == 2 * len(list(lora_layers(codes)))
    for ours, plain in zip(gradients, expected, strict=True):
        assert np.linalg.norm(plain) > 0
        assert np.linalg.norm(ours - plain) <= limit * np.linalg.norm(plain)
