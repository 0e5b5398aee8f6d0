"""Convert a checkpoint to GGUF, for contenders that read only GGUF (llama.cpp).

    python -m tools.bench.to_gguf CHECKPOINT model.gguf --dtype bf16
    python -m tools.bench.to_gguf CHECKPOINT model.gguf --dtype q8_0 --llama-bin build/bin

llama.cpp loads no model without a tokenizer, and a checkpoint with random weights has none. The
tokenizer here has three special tokens, the bytes, and one piece for each remaining id.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ed_models.checkpoints import hub
from tokenizers import Tokenizer
from tokenizers.models import BPE

from tools.bench.measure import command_line

DTYPES = ("f32", "bf16")
#: Formats that `llama-quantize` produces from a file in one of DTYPES.
QUANTIZED = ("q8_0", "q4_0")
SPECIAL = ("<unk>", "<s>", "</s>")


def write(checkpoint: Path, path: Path, dtype: str) -> None:
    """Write a checkpoint in Hugging Face layout as a GGUF file with the tokenizer of the benchmark.

    Args:
        checkpoint: Directory with `config.json` and `model.safetensors`.
        path: Path of the new file.
        dtype: Dtype of the matrices, "f32" or "bf16"; norms are float32.

    Raises:
        ValueError: The vocabulary is too small for the tokenizer.
    """
    model: Any = hub.from_pretrained(checkpoint, sharding_axis_dims=(1, 1, 1, 1, 1))
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder), model.config.vocab_size)
        model.save_gguf(path, tokenizer=folder, dtype=dtype)


def quantize(source: Path, path: Path, dtype: str, llama_bin: Path) -> None:
    """Convert a file of `write` to one of QUANTIZED with llama.cpp's own program.

    llama.cpp keeps the head, or an embedding that is also the head, in a format of more bits.
    """
    command = [str(llama_bin / "llama-quantize"), str(source), str(path), dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def save_tokenizer(folder: Path, vocab: int) -> None:
    """Write a tokenizer of `vocab` tokens: special tokens, the bytes, and words."""
    words = vocab - len(SPECIAL) - 256
    if words < 0:
        raise ValueError(
            f"a vocabulary of {vocab} is too small: it needs at least {256 + len(SPECIAL)} tokens"
        )
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*SPECIAL, *in_bytes, *(f"\u2581t{word}" for word in range(words))]
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(ids, [], unk_token=SPECIAL[0], byte_fallback=True))
    tokenizer.add_special_tokens([*SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def main() -> None:
    """Parse the command line, and write the file."""
    parser = command_line("to_gguf", __doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("path", type=Path)
    parser.add_argument("--dtype", choices=[*DTYPES, *QUANTIZED], default="bf16")
    parser.add_argument("--llama-bin", type=Path, help="directory of llama-quantize")
    args = parser.parse_args()
    if args.dtype in DTYPES:
        return write(args.checkpoint, args.path, args.dtype)
    if args.llama_bin is None:
        parser.error(f"--dtype {args.dtype} needs --llama-bin")
    with tempfile.TemporaryDirectory() as directory:
        wide = Path(directory) / "f32.gguf"
        write(args.checkpoint, wide, "f32")
        quantize(wide, args.path, args.dtype, args.llama_bin)


if __name__ == "__main__":
    main()
