"""The blocks of EasyDeL's and EasyLM's documents, and a folder in which they run.

`documents/` has the texts without a change. No name in a block is replaced. The folder has a
directory for each name of the hub, which `transformers`, `datasets` and this project read instead.
`SUBSTITUTED` lists these names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.snippets.pages import Block, blocks

DOCUMENTS = Path(__file__).parent / "documents"

#: Names of models in the documents -> kind of the local directory.
MODELS = {
    "meta-llama/Llama-2-7b-hf": "llama",
    "meta-llama/Llama-2-70b-hf": "llama",
    "meta-llama/Llama-2-7b-chat-hf": "llama",
    "my-sft-model": "llama",
    "my-local-model": "llama",
    "model-name": "llama",
    "deepseek/DeepSeek-V3": "my_model",
    "organization/model-name": "my_model",
    "google-bert/bert-base-uncased": "bert",
    "test/saved_model": "bert",
}
#: Names of data sets -> columns of a row; `{}` is the number of the row.
DATASETS: dict[str, dict[str, list[dict[str, Any]]]] = {
    "databricks/dolly-15k": {"train": [{"text": "The sum of {} and 1 is a number."}]},
    "your-dataset": {"train": [{"content": "The sum of {} and 1 is a number."}]},
    "dataset": {"train": [{"content": "The sum of {} and 1 is a number."}]},
    "Rowan/hellaswag": {
        split: [
            {
                "ind": 1,
                "activity_label": "Counting",
                "ctx_a": "A man counts to {}.",
                "ctx_b": "then he",
                "ctx": "A man counts to {}. then he",
                "endings": ["stops.", "sings.", "runs.", "sleeps."],
                "source_id": "a",
                "split": split,
                "split_type": "indomain",
                "label": "0",
            }
        ]
        for split in ("train", "validation")
    },
    "openai/gsm8k": {
        split: [{"question": "What is {} + 1?", "answer": "Add 1.\n#### 2"}]
        for split in ("train", "test")
    },
    "cais/mmlu": {
        split: [
            {
                "question": "What is {} + 1?",
                "subject": "sums",
                "choices": ["1", "2", "3", "4"],
                "answer": 1,
            }
        ]
        for split in ("test", "validation", "dev")
    },
    "allenai/winogrande": {
        split: [
            {
                "sentence": "Ann saw Bea {} times because _ waited.",
                "option1": "Ann",
                "option2": "Bea",
                "answer": "1",
            }
        ]
        for split in ("train", "validation")
    },
    "allenai/ai2_arc": {
        split: [
            {
                "id": "a{}",
                "question": "What is {} + 1?",
                "choices": {"text": ["1", "2", "3"], "label": ["A", "B", "C"]},
                "answerKey": "B",
            }
        ]
        for split in ("train", "validation", "test")
    },
}
#: Configurations of the data sets that tasks select by name.
CONFIGURATIONS = {
    "openai/gsm8k": ["main"],
    "allenai/winogrande": ["winogrande_xl"],
    "allenai/ai2_arc": ["ARC-Easy", "ARC-Challenge"],
}
SUBSTITUTED = [*MODELS, *DATASETS]


@dataclass(frozen=True)
class Example:
    """A block of a document.

    Attributes:
        name: `document:line`, the id of its test.
        block: The code.
    """

    name: str
    block: Block

    @property
    def body(self) -> str:
        return self.block.body


def examples(document: str) -> list[Example]:
    """Return the blocks of a document, in order: fences, and sessions of a Python prompt."""
    page = DOCUMENTS / f"{document}.txt"
    found = [*blocks(page), *sessions(page)]
    found.sort(key=lambda block: block.line)
    return [Example(f"{document}:{block.line}", block) for block in found]


def everything() -> list[Example]:
    """Return the blocks of all documents."""
    return [one for page in sorted(DOCUMENTS.glob("*.txt")) for one in examples(page.stem)]


def sessions(page: Path) -> Iterator[Block]:
    """Yield the examples of a Python prompt; consecutive lines are one block.

    Every line after a prompt is code. The documents close a call with `>>> )`.
    """
    lines = page.read_text("utf-8").splitlines()
    code: list[str] = []
    start = 0
    for number, line in enumerate([*lines, ""], 1):
        match = re.match(r"(?:>>>|\.\.\.)(?: (.*))?$", line)
        if match:
            start = start if code else number
            code.append(match[1] or "")
        elif code:
            yield Block(page, start, "python", "\n".join(code) + "\n")
            code = []


def make_folder(folder: Path, tokenizer: Any) -> None:
    """Write the models, the data and the files of the examples into a folder."""
    for name, kind in MODELS.items():
        _write_model(folder / name, kind, tokenizer)
    for name, splits in DATASETS.items():
        _write_dataset(folder / name, name, splits)
    (folder / "train").mkdir()
    sums = [{"text": f"The sum of {n} and 1 is {n + 1}. " * 4} for n in range(64)]
    _write_rows(folder / "train/a.json", sums)
    _write_rows(folder / "train.json", sums)
    pairs = [
        {"prompt": f"{n} + 1 =", "chosen": f" {n + 1}.", "rejected": " No idea."} for n in range(64)
    ]
    _write_rows(folder / "preference_data.json", pairs)


def _write_model(folder: Path, kind: str, tokenizer: Any) -> None:
    from ed_infra.testing import tiny_llama
    from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

    if kind == "llama":
        fields = tiny_llama(
            num_hidden_layers=1, vocab_size=len(tokenizer), max_position_embeddings=8192
        )
        del fields["model_type"]
        fields["eos_token_id"] = tokenizer.eos_token_id
        LlamaForCausalLM.create(LlamaConfig(**fields)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return
    folder.mkdir(parents=True)
    config = {"model_type": "my_model" if kind == "my_model" else "bert", "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "my_configuration.json").write_text(json.dumps(config))


def _write_dataset(folder: Path, name: str, splits: dict[str, list[dict[str, Any]]]) -> None:
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        texts = [json.dumps(rows[n % len(rows)]) for n in range(8)]
        filled = [json.loads(text.replace("{}", str(n))) for n, text in enumerate(texts)]
        _write_rows(folder / f"{split}.jsonl", filled)
    named = CONFIGURATIONS.get(name, _subjects() if name == "cais/mmlu" else [])
    if named:
        lines = ["---", "configs:"]
        for one in named:
            lines += [f"- config_name: {one}", "  data_files:"]
            for split in splits:
                lines += [f"  - split: {split}", f"    path: {split}.jsonl"]
        (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


def _subjects() -> list[str]:
    """Return the names of the configurations of MMLU, from the task files of lm-eval."""
    import lm_eval

    folder = Path(lm_eval.__file__).parent / "tasks/mmlu/default"
    names = re.findall(
        r'^"?dataset_name"?: "?(\w+)"?',
        "\n".join(file.read_text() for file in sorted(folder.glob("mmlu_*.yaml"))),
        re.MULTILINE,
    )
    assert len(names) > 50
    return names


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
