"""Train on a packed mixture on any mesh, for `test_multidevice_resume`.

Arguments: the folder of the data and its cache, the directory of the run, the number of steps, and
the five sizes of the mesh. Each process writes the rows of each batch that it has prepared to
`read_PROCESS.json` in the directory of the run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import ed_data.batches.loader
import jax
import numpy as np
from ed_data import Mixture, build_loader, train_bpe
from ed_infra import distributed
from ed_trainers import SFTArguments, SFTTrainer

from tests.multidevice import llama_case as case

ROWS, LENGTH = 8, 64


def write(folder: Path) -> None:
    """Write two sources: short documents and long documents."""
    random = np.random.default_rng(0)
    words = ["sheep", "goats", "graze", "under", "old", "trees", "and", "wait", "for", "rain"]
    for name, count, longest in (("short", 120, 12), ("long", 40, 90)):
        rows = [
            {"content": " ".join(random.choice(words, random.integers(4, longest)))}
            for _ in range(count)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)


def train(folder: Path, directory: Path, steps: int, dims: case.Dims) -> None:
    """Resume a run from its last checkpoint, if any, and train up to a step."""
    texts = [
        json.loads(line)["content"]
        for name in ("short", "long")
        for line in (folder / f"{name}.jsonl").read_text().splitlines()
    ]
    mixture = Mixture(
        informs=[
            {"name": name, "data_files": str(folder / f"{name}.jsonl")}
            for name in ("short", "long")
        ],
        mixture_weights={"short": 0.3, "long": 0.7},
        pack_tokens=True,
        pack_seq_length=LENGTH,
        cache_dir=str(folder / "cache"),
        prefetch_workers=0,
        seed=5,
    )
    loader = build_loader(mixture, train_bpe(texts, 270), batch_size=ROWS)
    config = case.config(dims, vocab_size=272, max_position_embeddings=LENGTH)
    arguments = SFTArguments(
        save_directory=str(directory),
        total_batch_size=ROWS,
        gradient_accumulation_steps=2,
        max_training_steps=steps,
        log_steps=1,
        report_steps=1,
        learning_rate=1e-2,
        use_tensorboard=False,
    )
    model = case.LlamaForCausalLM.create(config, seed=1)
    make = ed_data.batches.loader.make_batch
    with mock.patch.object(ed_data.batches.loader, "make_batch", side_effect=make) as made:
        SFTTrainer(arguments, model=model, train_dataset=loader).train()
    rows = [call.args[2] for call in made.call_args_list]
    (directory / f"read_{jax.process_index()}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    distributed.initialize()
    train(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), tuple(map(int, sys.argv[4:])))  # type: ignore[arg-type]
