"""Compare a training step with torch in time and memory: with TRL (`dpo`) or `transformers`.

    python -m tools.bench.train                       15M parameters, 8 rows of 256 tokens
    python -m tools.bench.train --shape 135m --rows 2
    python -m tools.bench.train --shape 135m --rows 2 --contenders "ours adafactor rematerialized"
    python -m tools.bench.train --vocab 1000          a small head, to measure the layers
    python -m tools.bench.train --contenders ours "ours bf16" "torch bf16" --rounds 9
    python -m tools.bench.train --method dpo --rows 4    4 pairs of 256 tokens, compared with TRL
    python -m tools.bench.train --method mlm --length 128        BERT-base, 15 % of tokens masked
    python -m tools.bench.train --method seq2seq --length 128    T5-small, as many target tokens
    python -m tools.bench.train --shape 1b --length 2048 --contenders "ours bf16" "torch bf16"

Each contender runs in a separate process with a separate memory peak. Steps are interleaved, so
that a slow moment of the machine affects all contenders. A step consists of forward, backward,
clipping to a norm of 1 and AdamW; for `dpo` also the forward pass of the reference, which is a
separate model on both sides.

On a GPU, torch runs on the GPU, too, and the peaks are those of the device in the whole process.

Ratios are of medians. Peaks are resident memory above that of the same process after two steps of a
tiny model: one peak of the measured steps, and one of the first, which compiles. "bf16" computes in
bfloat16 with float32 parameters: `dtype` of the configuration, torch's autocast. "scanned" is
`scan_layers: true`; without this word, the layers are as `elarge` lays them out: on one CPU, each
layer is compiled separately and has separate parameter arrays, unless layers are rematerialized.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench import decode
from tools.bench.measure import command_line, machine, resident, status, table, torch_device

#: Fields of Llama by the name of a shape. The first is the size of pretrain.yaml, the second
#: SmolLM2-135M's, the third Llama 3.2 1B's with fewer words.
SHAPES: dict[str, dict[str, Any]] = {
    "15m": {
        "num_hidden_layers": 6,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "tie_word_embeddings": True,
    },
    "135m": {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "1b": {**decode.SHAPES["llama-1b"], "vocab_size": decode.VOCAB},
    "bert-base": {"vocab_size": 30522},
    "t5-small": {"vocab_size": 32128},
}
#: Method -> the shapes that it trains; the first is the default.
SHAPES_OF = {
    "sft": ("15m", "135m", "1b"),
    "dpo": ("15m", "135m"),
    "mlm": ("bert-base",),
    "seq2seq": ("t5-small",),
}
#: Method -> its contenders. Ratios are relative to `torch`.
CONTENDERS = {
    "sft": ("ours", "ours rematerialized", "ours bf16", "torch", "torch bf16"),
    "dpo": ("ours", "ours rematerialized", "torch"),
    "mlm": ("ours", "ours bf16", "torch", "torch bf16"),
    "seq2seq": ("ours", "ours bf16", "torch", "torch bf16"),
}
#: Contenders with another optimizer, which rematerialize layers.
OPTIMIZERS = {f"ours {name} rematerialized": name for name in ("adamw_8bit", "adafactor")}
#: Contenders with scanned layers. The others have the layout that `elarge` selects on the device.
SCANNED = ("ours scanned", "ours bf16 scanned")
#: Contenders that run only if `--contenders` names them.
ON_REQUEST = (*SCANNED, *OPTIMIZERS, "torch bf16 compiled")
ALL = tuple(dict.fromkeys([n for names in CONTENDERS.values() for n in names] + [*ON_REQUEST]))
_RATE = 1e-4
#: Number of steps that compile and warm up.
WARM_UP = 2
#: The tiny model that a process trains before its idle memory is measured.
TINY = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 256}
TINY_BERT = {**TINY, "num_attention_heads": 1}
TINY |= {"num_attention_heads": 1, "num_key_value_heads": 1}
TINY_T5 = {"num_layers": 1, "d_model": 64, "d_kv": 64, "d_ff": 64, "num_heads": 1}
TINY_T5 |= {"vocab_size": 256}
#: Token of BERT that replaces masked tokens, and the share of masked tokens.
MASK, MASKED = 103, 0.15
#: Number of prompt tokens of a pair.
PROMPT = 32
Step = Callable[[], float]


def jax_step(
    method: str,
    fields: dict[str, Any],
    ids: np.ndarray,
    *,
    policy: str = "",
    dtype: str = "float32",
    scan_layers: bool = False,
    optimizer: str = "adamw",
) -> Step:
    """Return a step of a method's trainer; the step computes in `dtype` and returns the loss."""
    import jax
    import jax.numpy as jnp
    from ed_elarge.building.parts import build_layout
    from ed_infra import freed_memory
    from ed_trainers import arguments_class, trainer_class
    from ed_trainers.optimizers import build_optimizer, build_schedule
    from ed_trainers.state import EasyDeLState
    from ed_trainers.step import build_train_step

    freed_memory.compute_in_calling_thread()  # as `elarge` does
    trained = "sft" if method == "seq2seq" else method
    arguments = arguments_class(trained)(
        total_batch_size=len(ids),
        max_training_steps=1000,
        learning_rate=_RATE,
        scheduler="none",
        clip_grad=1.0,
        optimizer=optimizer,
    )
    dims = (1, 1, 1, 1, 1)
    settings = {**build_layout(policy, optimizer), "gradient_checkpointing": policy}
    if scan_layers:
        settings["scan_layers"] = True
    config_class, model_class = jax_classes(method)
    config = config_class(**fields, sharding_axis_dims=dims, **settings)
    model = model_class.create(
        config, seed=0, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype("float32")
    )
    tokenizer: dict[str, Any] = {}
    if method == "mlm":
        tokenizer["processing_class"] = Words(fields["vocab_size"])
    trainer = trainer_class(trained)(arguments, model, **tokenizer)
    schedule = build_schedule(arguments, 1000)
    state = EasyDeLState.create(model=trainer.model)
    state = state.init_tx(build_optimizer(arguments, schedule))
    step = build_train_step(state, trainer.method, schedule, rows=len(ids), seed=0)
    batch = {"input_ids": ids}
    if method == "seq2seq":
        batch["labels"] = ids[:, ::-1].copy()
    if method == "dpo":
        chosen, rejected = answers(ids)
        batch = {}
        for side, rows in (("chosen", chosen), ("rejected", rejected)):
            labels = np.where(np.arange(rows.shape[1]) < PROMPT, -100, rows)
            batch |= {f"{side}_input_ids": rows, f"{side}_labels": labels.astype(np.int32)}
    placed = trainer.placement.place(
        jax.tree.map(lambda x: x[None], trainer.prepare(batch)),
        stacked=True,
    )
    leaves = tuple(jax.tree.leaves(state))
    del state, trainer, model

    def run() -> float:
        nonlocal leaves
        leaves, report = step(leaves, placed)
        freed_memory.keep()  # as after the first step of a run
        return float(report["loss"])

    return run


def jax_classes(method: str) -> tuple[Any, Any]:
    """Return the classes of configuration and model of a method."""
    if method == "mlm":
        from ed_models.families.bert import BertConfig, BertForMaskedLM

        return BertConfig, BertForMaskedLM
    if method == "seq2seq":
        from ed_models.families.t5 import T5Config, T5ForConditionalGeneration

        return T5Config, T5ForConditionalGeneration
    from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

    return LlamaConfig, LlamaForCausalLM


class Words:
    """The attributes of a tokenizer that masking reads."""

    mask_token_id = MASK
    all_special_ids: tuple[int, ...] = ()

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        """Return the texts of tokens."""
        return [f"w{i}" for i in ids]


def answers(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two answers to each row's prompt: the row itself, and the next row's tokens."""
    other = np.concatenate([ids[:, :PROMPT], np.roll(ids, 1, axis=0)[:, PROMPT:]], axis=1)
    return ids, other


def torch_model(fields: dict[str, Any], method: str = "sft") -> Any:
    """Return the model of `transformers` in training mode."""
    import torch
    import transformers

    torch.manual_seed(0)
    family, auto = {
        "mlm": ("bert", transformers.AutoModelForMaskedLM),
        "seq2seq": ("t5", transformers.AutoModelForSeq2SeqLM),
    }.get(method, ("llama", transformers.AutoModelForCausalLM))
    config = transformers.AutoConfig.for_model(family, **fields)
    if method == "seq2seq":
        config.decoder_start_token_id = 0
    # T5 has no implementation of its relative positions besides "eager".
    attention = "eager" if method == "seq2seq" else "sdpa"
    return auto.from_config(config, attn_implementation=attention).train()


def torch_loop(model: Any, loss_of: Callable[[], Any]) -> Step:
    """Return a step of a plain training loop; the step returns the loss."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)

    def run() -> float:
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return run


def torch_step(
    method: str,
    fields: dict[str, Any],
    ids: np.ndarray,
    *,
    autocast: bool,
    compiled: bool = False,
) -> Step:
    """Return a step on the cross-entropy of the next token, of masked tokens or of targets."""
    import torch

    device = torch_device()
    model = torch_model(fields, method).to(device)
    inputs = labels = torch.tensor(ids, dtype=torch.long, device=device)
    if method == "mlm":
        masked = torch.rand(inputs.shape, device=device) < MASKED
        inputs, labels = inputs.masked_fill(masked, MASK), inputs.masked_fill(~masked, -100)
    if method == "seq2seq":
        labels = inputs.flip(1)
    options = {} if method == "mlm" else {"use_cache": False}
    called = torch.compile(model) if compiled else model

    def loss() -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            return called(input_ids=inputs, labels=labels, **options).loss

    return torch_loop(model, loss)


def trl_step(fields: dict[str, Any], ids: np.ndarray) -> Step:
    """Return a step on the loss of `trl.DPOTrainer`."""
    import copy
    import tempfile

    import torch
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from tests.parity.method_cases import harness

    model = torch_model(fields)
    trainer = DPOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),
        args=harness.config_of(DPOConfig, tempfile.mkdtemp(prefix="trl-")),
        train_dataset=Dataset.from_list(harness.text_pairs()),
        processing_class=harness.tokenizer(),
    )
    rows = torch.tensor(np.concatenate(answers(ids)), dtype=torch.long)
    inputs = {
        "input_ids": rows,
        "attention_mask": torch.ones_like(rows),
        "completion_mask": (torch.arange(rows.shape[1]) >= PROMPT).long().expand_as(rows),
    }
    return torch_loop(model, lambda: trainer.compute_loss(model, inputs))


def work(method: str, name: str, fields: dict[str, Any], rows: int, length: int) -> None:
    """Execute a step for each line of standard input; print its seconds, its loss and the peak."""
    remat = partial(jax_step, method, policy="nothing_saveable")
    made: dict[str, Callable[[dict[str, Any], np.ndarray], Step]] = {
        "ours": partial(jax_step, method),
        "ours scanned": partial(jax_step, method, scan_layers=True),
        "ours rematerialized": remat,
        **{name: partial(remat, optimizer=optimizer) for name, optimizer in OPTIMIZERS.items()},
        "ours bf16": partial(jax_step, method, dtype="bfloat16"),
        "ours bf16 scanned": partial(jax_step, method, dtype="bfloat16", scan_layers=True),
        "torch": trl_step if method == "dpo" else partial(torch_step, method, autocast=False),
        "torch bf16": partial(torch_step, method, autocast=True),
        "torch bf16 compiled": partial(torch_step, method, autocast=True, compiled=True),
    }
    ids = np.random.default_rng(0).integers(0, fields["vocab_size"], (rows, length))
    tiny = {**fields, **{"mlm": TINY_BERT, "seq2seq": TINY_T5}.get(method, TINY)}
    step = made[name](tiny, np.zeros((2, 2 * PROMPT), np.int32))
    for _ in range(2):
        step()
    del step
    if name.startswith("ours"):
        from ed_infra import freed_memory

        freed_memory.give_back()
    idle = resident()
    first = 0
    step = made[name](fields, ids.astype(np.int32))
    for turn, _ in enumerate(sys.stdin):
        if turn == WARM_UP:
            first = peak_above(idle, name)
            resident()
            Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
        began = time.perf_counter()
        loss = step()
        report = {"seconds": time.perf_counter() - began, "loss": loss}
        if turn >= WARM_UP:
            report |= {"first": first, "peak": peak_above(idle, name)}
        print(json.dumps(report), flush=True)


def peak_above(idle: int, name: str) -> int:
    """Return the peak of resident memory above `idle`, on a GPU the peak of the device's memory."""
    if torch_device() == "cpu":
        return status("VmHWM") - idle
    if name.startswith("torch"):
        import torch

        return torch.cuda.max_memory_allocated()
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    return int(stats["peak_bytes_in_use"])


class Worker:
    """A contender in a separate process."""

    def __init__(self, name: str, args: argparse.Namespace):
        words = [
            args.method,
            name,
            args.shape,
            str(args.vocab or 0),
            str(args.rows),
            str(args.length),
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools.bench.train", "--worker", *words],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def step(self) -> dict[str, float]:
        """Execute one step while the other contenders wait."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a contender ended; see the lines above")
        return json.loads(line)


def fields_of(shape: str, vocab: int) -> dict[str, Any]:
    """Return the fields of a shape; `vocab` replaces the vocabulary size unless it is 0."""
    return {**SHAPES[shape], **({"vocab_size": vocab} if vocab else {})}


def measure(args: argparse.Namespace) -> list[list[str]]:
    """Return a row for each contender."""
    workers = {name: Worker(name, args) for name in args.contenders}
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    for turn in range(args.rounds + WARM_UP):
        for name, worker in workers.items():
            found = worker.step()
            if turn >= WARM_UP:
                steps[name].append(found)
    for worker in workers.values():
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        worker.process.wait()
    medians = {n: statistics.median(s["seconds"] for s in all_) for n, all_ in steps.items()}
    base = medians.get("torch", medians.get("torch bf16"))
    rows = []
    for name, found in steps.items():
        times = [s["seconds"] for s in found]
        sides = 2 if args.method == "dpo" else 1
        rate = sides * args.rows * args.length / medians[name]
        rows.append(
            [
                name,
                f"{medians[name]:.3f}",
                f"{min(times):.3f}",
                f"{rate:,.0f}",
                f"{base / medians[name]:.2f}" if base else "",
                f"{found[-1]['peak'] / 2**30:.2f}",
                f"{found[-1]['first'] / 2**30:.2f}",
            ]
        )
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        method, name, shape, vocab, rows, length = sys.argv[2:]
        return work(method, name, fields_of(shape, int(vocab)), int(rows), int(length))
    parser = command_line("train", __doc__)
    parser.add_argument("--shape", choices=SHAPES, help="default: the first of the method")
    parser.add_argument("--vocab", type=int, help="vocabulary size; default: the shape's")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--method", choices=CONTENDERS, default="sft")
    parser.add_argument("--contenders", nargs="+", choices=ALL)
    args = parser.parse_args()
    args.shape = args.shape or SHAPES_OF[args.method][0]
    if args.shape not in SHAPES_OF[args.method]:
        parser.error(f"shapes of {args.method}: {', '.join(SHAPES_OF[args.method])}")
    args.contenders = args.contenders or CONTENDERS[args.method]
    possible = (*CONTENDERS[args.method], *ON_REQUEST)
    if not {*args.contenders} <= {*possible}:
        parser.error(f"contenders of {args.method}: {', '.join(possible)}")
    vocab = fields_of(args.shape, args.vocab or 0)["vocab_size"]
    print(machine(), f"load {os.getloadavg()[0]:.1f}", sep="; ")
    rows = f"{args.rows} {'pairs' if args.method == 'dpo' else 'rows'} of {args.length} tokens"
    print(f"{args.method}, {args.shape}, vocabulary {vocab:,}, {rows}")
    header = ["", "s a step", "least", "tokens/s", "torch / this", "peak, GiB", "first step's"]
    print(table(header, measure(args)))


if __name__ == "__main__":
    main()
