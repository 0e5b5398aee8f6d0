"""Measure time and memory of `elarge certify`.

    python -m tools.bench.certify [--hidden 576] [--layers 30] [--vocab 4096]

A Llama with random weights and a trained tokenizer is saved, and the command runs in a process of
its own: with `--quick`, and with all checks. The memory is the largest resident set.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ed_data.tokens.bpe import train_bpe
from ed_infra.testing import english_topics
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

from tools.bench.measure import command_line


def save(folder: Path, hidden: int, layers: int, vocab: int) -> int:
    """Save a model and its tokenizer, and return the number of bytes."""
    train_bpe(english_topics().values(), vocab_size=420).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64 or 1,
        num_key_value_heads=hidden // 64 or 1,
        bos_token_id=0,
        eos_token_id=1,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    LlamaForCausalLM.create(config, seed=0).save_pretrained(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def measured(folder: Path, *flags: str) -> tuple[float, float, float]:
    """Return the seconds of the command, its CPU seconds, and the largest memory so far in GiB."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "ed_elarge", "certify", str(folder), *flags], capture_output=True
    )
    seconds = time.perf_counter() - began
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr.decode()[-2000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, used, after.ru_maxrss / 2**20


def main() -> None:
    parser = command_line("certify", __doc__)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--vocab", type=int, default=4096)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        size = save(folder, args.hidden, args.layers, args.vocab)
        print(f"{size / 2**20:.0f} MiB of weights")
        for flags in (("--quick",), ()):
            seconds, used, memory = measured(folder, *flags)
            text = f"{seconds:.1f} s ({used:.1f} s of CPU), {memory:.2f} GiB"
            print(f"certify {' '.join(flags)}: {text}", flush=True)


if __name__ == "__main__":
    main()
