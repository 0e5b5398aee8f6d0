"""Previews, benchmarks and the profiler's window, in one short run; and who cannot have them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import SFTArguments, SFTTrainer
from ed_trainers.arguments import idle_options
from ed_trainers.figures.metrics import curves, read_metrics
from ed_trainers.probes import Previews, beginnings
from method_runs import Pairs
from pydantic import ValidationError


class Letters:
    """A tokenizer: the letter n of the alphabet is the token n."""

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, token_ids, *, skip_special_tokens=False):
        assert skip_special_tokens
        return "".join(chr(ord("a") + token) for token in token_ids)

    def save_pretrained(self, directory):
        pass


class Alphabet:
    """Rows of the alphabet, each from another letter on."""

    steps_per_epoch = 20
    fingerprint = "alphabet"

    def batch_at(self, step):
        ids = (np.arange(8)[:, None] + np.arange(12) + step) % 26
        return {"input_ids": ids.astype(np.int32)}


def model():
    config = LlamaConfig(
        vocab_size=26,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        eos_token_id=None,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    return LlamaForCausalLM.create(config)


def trainer(directory, *, benchmark=None, tokens=True, learner=None, **given):
    arguments = SFTArguments(
        **{
            "save_directory": str(directory),
            "total_batch_size": 8,
            "max_training_steps": 50,
            "learning_rate": 3e-2,
            "log_steps": 25,
            "use_tensorboard": False,
            "do_last_save": False,
            **given,
        }
    )
    held_out = Alphabet()
    held_out.steps_per_epoch = 1
    return SFTTrainer(
        arguments,
        learner or model(),
        Alphabet(),
        held_out if "generation_prompts" not in given else None,
        processing_class=Letters() if tokens else None,
        benchmark=benchmark,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("probed")
    measured = []

    def benchmark(tasks, weights):
        measured.append((tuple(tasks), weights.version))
        return {task: {"acc": 0.5 + weights.version / 1000} for task in tasks}

    trainer(
        directory,
        benchmark=benchmark,
        generation_interval=25,
        generation_prompts=["abcd", "ij"],
        generation_max_new_tokens=5,
        benchmark_interval=40,
        benchmarks=["spelling"],
        profile_start_step=3,
        profile_steps=2,
    ).train()
    return SimpleNamespace(
        directory=directory, measured=measured, rows=read_metrics(directory / "metrics.jsonl")
    )


@pytest.mark.nightly
@pytest.mark.proves("generation_interval", "generation_prompts", "generation_max_new_tokens")
def test_previews_appear_in_metrics_and_report(run):
    previews = [row for row in run.rows if "samples" in row]
    assert [row["step"] for row in previews] == [25, 50]
    last = previews[-1]["samples"]
    assert last == [
        {"prompt": "abcd", "completion": "efghi"},
        {"prompt": "ij", "completion": "klmno"},
    ]
    page = (run.directory / "report.html").read_text()
    assert "Samples while training" in page
    assert "<summary>step 50</summary><pre><span class=prompt>abcd</span>efghi</pre>" in page
    # A row of samples is no row of a step.
    assert [row["step"] for row in run.rows if "loss" in row] == [1, 25, 50]


@pytest.mark.nightly
@pytest.mark.proves("benchmark_interval", "benchmarks")
def test_benchmarks_are_run_by_the_weights_of_their_step(run):
    assert run.measured == [(("spelling",), 40), (("spelling",), 50)]
    rows = [row for row in run.rows if "benchmark/spelling/acc" in row]
    assert [(row["step"], row["benchmark/spelling/acc"]) for row in rows] == [
        (40, 0.54),
        (50, 0.55),
    ]
    assert curves(rows[0]) == {"benchmark/spelling/acc": 0.54}
    assert '"name":"benchmark/spelling/acc"' in (run.directory / "report.html").read_text()


@pytest.mark.nightly
@pytest.mark.proves("profile_start_step", "profile_steps")
def test_a_few_steps_are_traced(run):
    assert len(list((run.directory / "profile").rglob("*.xplane.pb"))) == 1


@pytest.mark.nightly
@pytest.mark.proves("generation_num_prompts", "generation_temperature", "generation_top_p")
def test_previews_begin_held_out_documents_and_sample_by_step(tmp_path):
    given = {"generation_interval": 1, "max_training_steps": 2, "learning_rate": 1e-9}
    settings = {"generation_num_prompts": 2, "generation_max_new_tokens": 6}
    found = []
    for name, top_p in (("open", 1.0), ("narrow", 1e-6)):
        sampling = {"generation_temperature": 1.0, "generation_top_p": top_p}
        trainer(tmp_path / name, **given, **settings, **sampling).train()
        rows = read_metrics(tmp_path / name / "metrics.jsonl")
        found.append([row["samples"] for row in rows if "samples" in row])
    sampled, likeliest = found
    assert [sample["prompt"] for sample in sampled[0]] == ["abcdef", "bcdefg"]
    assert sampled[0] != sampled[1], "each preview has a different seed"
    assert likeliest[0] == likeliest[1]


class Recorder:
    """A model that notes the options of `generate`, and repeats the last token of each prompt."""

    config = SimpleNamespace(eos_token_id=None)
    generation_json = None

    def generate(self, ids, *, attention_mask, **options):
        self.options = options
        rows = np.repeat(ids, options.get("num_return_sequences", 1), axis=0)
        more = np.repeat(rows[:, -1:], options["max_new_tokens"], axis=1)
        return SimpleNamespace(sequences=np.concatenate([rows, more], axis=1))


SAMPLED = {
    "generation_do_sample": True,
    "generation_top_k": 5,
    "generation_top_p": 0.5,
    "generation_repetition_penalty": 1.5,
    "generation_presence_penalty": -0.5,
    "generation_frequency_penalty": 0.25,
    "generation_num_return_sequences": 2,
    "generation_seed": 2**32 - 1,
    "generation_preview_print": False,
    "generation_use_train_prompts": True,
    "generation_num_prompts": 3,
}


def test_previews_pass_every_option_to_generate():
    given = {"generation_interval": 1, "generation_prompts": ["ab"]}
    given["generation_max_new_tokens"] = 1
    model, weights = Recorder(), SimpleNamespace(version=3)
    weights.model = model
    row, lines = Previews(SFTArguments(**given, **SAMPLED), Letters(), None, train=Alphabet()).look(
        weights
    )
    assert model.options == {
        "max_new_tokens": 1,
        "do_sample": True,
        "seed": 2,
        "temperature": 1.0,
        "top_k": 5,
        "top_p": 0.5,
        "num_return_sequences": 2,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
    }
    texts = [(sample["prompt"], sample["completion"]) for sample in row["samples"]]
    assert texts == [(p, p[-1]) for p in ("ab", "abcdef", "bcdefg") for _ in range(2)]
    assert lines == []
    _, lines = Previews(SFTArguments(**given), Letters(), None).look(weights)
    assert len(lines) == 1
    assert model.options == {"max_new_tokens": 1, "do_sample": False, "seed": 45}


def test_contradictions_of_previews_are_errors():
    for given, words in [
        ({"generation_do_sample": True, "generation_temperature": 0}, "samples nothing"),
        ({"generation_num_return_sequences": 2}, "are equal"),
        ({"generation_top_k": -1}, "greater than or equal to 0"),
        ({"generation_presence_penalty": 3}, "less than or equal to 2"),
        ({"generation_repetition_penalty": 0}, "greater than 0"),
    ]:
        with pytest.raises(ValidationError, match=words):
            SFTArguments(**given)
    arguments = SFTArguments(generation_interval=1, generation_use_train_prompts=True)
    with pytest.raises(ConfigError, match="not a loader with batch_at"):
        Previews(arguments, Letters(), None, train=iter([]))
    given = {"generation_do_sample": False, "generation_temperature": 0.5, "generation_top_k": 3}
    idle = dict(idle_options(SFTArguments(generation_interval=1, **given)))
    assert idle.keys() == {"generation_temperature", "generation_top_k"}


def test_documents_begin_with_their_prompts_or_their_first_half():
    batch = Pairs(rows=3).batch_at(0)
    counts = batch["chosen_segment_ids"].max(axis=1)
    found = beginnings(batch)
    assert len(found) == counts.sum() and all(len(prompt) == 2 for prompt in found)
    assert found[0] == batch["chosen_input_ids"][0, :2].tolist()
    text = {"input_ids": np.arange(12).reshape(2, 6), "attention_mask": np.tri(2, 6, 3, int)}
    assert beginnings(text) == [[0, 1], [6, 7]]
    prompts = SimpleNamespace(input_ids=[(1, 2), (3,)])
    assert beginnings(prompts) == [[1, 2], [3]]


@pytest.mark.nightly
def test_invalid_probe_options_raise_config_error(toy, tmp_path):
    for given, words in [
        ({"tokens": False, "generation_interval": 1}, "pass a tokenizer as processing_class"),
        ({"learner": toy.model(), "generation_interval": 1}, "ToyModel writes none"),
        ({"benchmark_interval": 1, "benchmarks": ["a"]}, "train with ed-elarge, or pass"),
    ]:
        with pytest.raises(ConfigError, match=words):
            trainer(tmp_path, **given)
    with pytest.raises(ConfigError, match="set generation_prompts, or pass an eval_dataset"):
        SFTTrainer(
            SFTArguments(generation_interval=1), model(), Alphabet(), processing_class=Letters()
        )
    idle = dict(
        idle_options(
            SFTArguments(
                generation_top_p=0.5, benchmarks=["a"], profile_steps=2, max_training_steps=5
            )
        )
    )
    assert idle["benchmarks"] == "benchmark_interval is not set"
    assert idle["profile_steps"] == "profile_start_step is not set"
    assert idle["generation_top_p"].startswith("generation_temperature is 0")
