"""What holds for every method: storage of layers, merged adapters, microbatches, chunks.

Methods of language models train a Llama, and the others a tiny model of their task.

Packing, meshes, chunks and microbatches of single methods are in the tests of their kind, over a
model that compiles in a second; here each of them is a row of one table.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_infra.parameter_names import canonical, is_stacked
from ed_infra.specs import LoraSpec
from ed_infra.testing import tiny_llama
from ed_models.adapters.lora import merge_lora
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import arguments_class
from ed_trainers.arguments import METHODS
from ed_trainers.online.phase import Phase
from ed_trainers.stored.arrays import flat_arrays
from encoder_runs import CASES, build_encoder
from flax import nnx
from method_runs import near_reports, one_step
from online_runs import END, ToyRollout
from online_runs import one_step as online_step
from test_trainers_methods import BATCHES

GIVEN = {
    "distillation": {"beta": 0.3},
    "gkd": {"rewards": (), "lmbda": 1.0},
    "grpo": {"num_iterations": 2, "beta": 0.1},
    "gspo": {"num_iterations": 2, "beta": 0.1},
    "gfpo": {"num_iterations": 2, "beta": 0.1, "num_remains_in_group": 2},
    "on_policy_distillation": {"rewards": ()},
    "sparse_distillation": {"rewards": (), "loss_top_k": 5},
    "iw_opd": {"rewards": ()},
    "draft": {"rewards": (), "draft_vocab_size": 24, "alpha": 0.5},
    # The teacher `base` has no adapters, and that of a merged model has them.
    "sdft": {
        "rewards": (),
        "distillation_topk": 5,
        "num_return_sequences": 4,
        "num_iterations": 2,
        "teacher_model_kind": "ema",
    },
    "sdpo": {
        "success_reward_threshold": 0.5,
        "distillation_weight": 0.5,
        "distillation_mode": "full_logits",
        "beta": 0.1,
        "num_iterations": 2,
    },
    "rloo": {"beta": 0.1},
    "rlvr": {"num_iterations": 2, "beta": 0.1},
    "ppo": {"num_iterations": 2, "beta": 0.1},
    "xpo": {"alpha": 0.1},
    "seq_kd": {"max_prompt_length": 4, "max_completion_length": 4},
}
# Adapters and whole weights have different gradients, so the metrics of the step are compared.
CHANGES = {"grad_norm", "figures"}


#: Methods whose step has one microbatch, because its loss compares the rows with each other.
WHOLE = {"embedding", "contrastive"}
#: Methods that train a layer beside the model, which has no adapters.
BESIDE = {"draft"}


class Prompted(dict):
    """Prompts, as a batch of rows for the tests' own step."""

    input_ids = tuple(np.random.default_rng(4).integers(3, 32, (8, 3)).tolist())


def build_learner(method="sft", scan=True, seed=0):
    """Return the model that a method trains."""
    if method in CASES:
        return build_encoder(method, scan=scan, seed=seed)
    entry = METHODS[method]
    fields = tiny_llama(
        num_hidden_layers=2,
        vocab_size=32,
        initializer_range=0.2,
        eos_token_id=END,
        pad_token_id=0,
        scan_layers=scan,
        sharding_axis_dims=(1, 1, 1, 1, 1),
        **({} if entry.labels is None else {"num_labels": entry.labels}),
        **({"mtp_head": "new"} if entry.arguments().trains_mtp else {}),
    )
    del fields["model_type"]
    config = LlamaConfig(**fields)
    if entry.task == TaskType.CAUSAL_LM:
        return LlamaForCausalLM.create(config, seed=seed)
    return registry.get_module(entry.task, "llama").create(config, seed=seed)


def adapted(method):
    """A learner whose adapters change its outputs."""
    learner = build_learner(method).apply_lora(LoraSpec(rank=2), seed=1)
    state = nnx.state(learner, nnx.LoRAParam)
    learned = jax.tree.map(lambda x: x + 0.1 * np.cos(np.arange(x.size)).reshape(x.shape), state)
    nnx.update(learner, learned)
    return learner


@pytest.fixture
def step(monkeypatch):
    """`step(method, learner, accumulation)`: what moved, and the report."""
    monkeypatch.setattr(Phase, "build_rollout", lambda self, make: ToyRollout())

    def step(method, learner, accumulation=1, **given):
        entry = METHODS[method]
        others = (*entry.needs, *(name for name in entry.may_read if name == "reference"))
        frozen = {name: build_learner(seed=5) for name in others}
        given = {**GIVEN.get(method, {}), **given}
        if entry.samples:
            return online_step(method, learner, accumulation, frozen=frozen, **given)
        if method in CASES:
            case = CASES[method]
            return one_step(
                method, learner, case.batch(), accumulation, frozen, case.tokenizer, **given
            )
        rows = Prompted(input_ids=np.zeros((8, 1))) if method == "seq_kd" else BATCHES[entry.rows]()
        return one_step(method, learner, rows, accumulation, frozen, **given)

    return step


def by_layer(moved):
    """Arrays by canonical name: each layer's own, whatever the storage."""
    out = {}
    for name, array in flat_arrays(moved).items():
        path = name.split("/")
        names = canonical(path)
        out |= zip(names, array if is_stacked(path) else [array], strict=True)
    return out


def same(left, right, tolerance=2e-5):
    left, right = by_layer(left), by_layer(right)
    assert left.keys() == right.keys()
    largest = max(np.abs(x).max() for x in right.values())
    assert largest > 1e-4, "or nothing is tested"
    for name, array in right.items():
        assert np.abs(left[name] - array).max() <= tolerance * largest, name


@pytest.mark.parametrize("method", METHODS)
def test_each_method_has_a_model_rows_and_valid_options(method):
    """The nightly tests below train each method; a new method without a row here fails by day."""
    entry = METHODS[method]
    family = CASES[method].family if method in CASES else "llama"
    assert registry.get_module(entry.task, family)
    options = {name: value for name, value in GIVEN.get(method, {}).items() if name != "rewards"}
    assert arguments_class(method)(**options)
    has_rows = entry.samples or method == "seq_kd" or entry.rows in BATCHES
    assert has_rows or CASES[method].batch()


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
def test_scanned_step_matches_unrolled_step(step, method):
    moved, report = step(method, build_learner(method))
    other, other_report = step(method, build_learner(method, scan=False))
    same(other, moved)
    near_reports(other_report, report, 2e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("method", [name for name in METHODS if name not in BESIDE])
def test_adapter_step_matches_merged_model_step(step, method):
    _, plain = step(method, build_learner(method))
    _, report = step(method, adapted(method))
    _, merged = step(method, merge_lora(adapted(method)))
    left, right = ({n: v for n, v in r.items() if n not in CHANGES} for r in (report, merged))
    near_reports(left, right, 2e-5)
    changed = {name for name in left if abs(left[name] - plain[name]) > 1e-4}
    assert changed, "or the adapters change nothing"


@pytest.mark.nightly
@pytest.mark.parametrize("method", [name for name in METHODS if name not in WHOLE])
def test_any_number_of_microbatches_is_one_step(step, method):
    """1 x 8 = 4 x 2 = 8 x 1; rows of the methods in `WHOLE` are compared with each other."""
    moved, report = step(method, build_learner(method))
    for accumulation in (2, 8):
        other, other_report = step(method, build_learner(method), accumulation)
        same(other, moved)
        near_reports(other_report, report, 2e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "method", [n for n, e in METHODS.items() if "lmhead_chunksize" in e.arguments.model_fields]
)
def test_chunked_loss_step_matches_unchunked_step(step, method):
    moved, report = step(method, build_learner(method))
    other, other_report = step(method, build_learner(method), lmhead_chunksize=7)
    same(other, moved)
    near_reports(other_report, report, 2e-5)


def test_methods_without_chunks_train_no_language_model():
    """Methods without `lmhead_chunksize` train models with a few outputs, not a vocabulary."""
    without = {n for n, e in METHODS.items() if "lmhead_chunksize" not in e.arguments.model_fields}
    vocabulary = {TaskType.CAUSAL_LM, TaskType.MASKED_LM, TaskType.SEQUENCE_TO_SEQUENCE}
    assert without == {n for n, e in METHODS.items() if e.task not in vocabulary}
