"""Convert a Llama checkpoint to GGUF, for contenders that read only GGUF (llama.cpp).

    python -m tools.bench.to_gguf CHECKPOINT model.gguf --dtype bf16
    python -m tools.bench.to_gguf CHECKPOINT model.gguf --dtype q8_0 --llama-bin build/bin

llama.cpp loads no model without a tokenizer, and a checkpoint with random weights has none. The
file's tokenizer has three special tokens, the bytes, and one piece for each remaining id.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tools.bench.measure import command_line

DTYPES = {"f32": gguf.GGMLQuantizationType.F32, "bf16": gguf.GGMLQuantizationType.BF16}
#: Formats that `llama-quantize` produces from a file in one of DTYPES.
QUANTIZED = ("q8_0", "q4_0")
FILE_TYPES = {"f32": gguf.LlamaFileType.ALL_F32, "bf16": gguf.LlamaFileType.MOSTLY_BF16}
SPECIAL = ("<unk>", "<s>", "</s>")


def write(checkpoint: Path, path: Path, dtype: str) -> None:
    """Write a Llama checkpoint of `transformers` (float32, one file) as a GGUF file.

    Args:
        checkpoint: Directory with `config.json` and `model.safetensors`.
        path: Path of the new file.
        dtype: Dtype of the matrices, "f32" or "bf16"; norms are float32.

    Raises:
        ValueError: The checkpoint is not a Llama, or its vocabulary is too small for the tokenizer.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"{checkpoint} is a {config['model_type']}; only llama is converted")
    writer = gguf.GGUFWriter(path, "llama")
    add_sizes(writer, config)
    writer.add_file_type(FILE_TYPES[dtype])
    add_tokenizer(writer, config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, array in load_file(checkpoint / "model.safetensors").items():
        kind = DTYPES["f32"] if array.ndim == 1 else DTYPES[dtype]
        data = gguf.quantize(as_llama_cpp(name, array, config), kind)
        new = names.get_name(name, try_suffixes=(".weight",))
        assert new is not None, name
        writer.add_tensor(new, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, path: Path, dtype: str, llama_bin: Path) -> None:
    """Convert a file of `write` to one of QUANTIZED with llama.cpp's own program.

    llama.cpp keeps the head, or an embedding that is also the head, in a format of more bits.
    """
    command = [str(llama_bin / "llama-quantize"), str(source), str(path), dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the fields of `config.json` that llama.cpp needs."""
    heads, width = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or width // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    """Write a SentencePiece tokenizer of `vocab` tokens."""
    words = vocab - len(SPECIAL) - 256
    if words < 0:
        raise ValueError(
            f"a vocabulary of {vocab} is too small: it needs at least {256 + len(SPECIAL)} tokens"
        )
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    types = gguf.TokenType
    kinds = [types.UNKNOWN, types.CONTROL, types.CONTROL, *[types.BYTE] * 256]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*SPECIAL, *in_bytes, *(f"\u2581t{word}" for word in range(words))])
    writer.add_token_scores([0.0] * (vocab - words) + [-float(word) for word in range(words)])
    writer.add_token_types([*kinds, *[types.NORMAL] * words])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def as_llama_cpp(name: str, array: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Return a tensor in llama.cpp's order: rotary pairs are adjacent, not split in halves."""
    array = array.astype(np.float32)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for projection, field in heads.items():
        if f"{projection}.weight" in name:
            halves = array.reshape(config[field], 2, -1, array.shape[1])
            return halves.swapaxes(1, 2).reshape(array.shape)
    return array


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
