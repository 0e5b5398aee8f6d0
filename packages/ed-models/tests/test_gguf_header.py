"""Headers of GGUF files: hostile files raise `CheckpointError` and reserve little memory."""

from __future__ import annotations

import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ed_infra.errors import CheckpointError
from ed_models.checkpoints.gguf.directory import as_directory
from ed_models.checkpoints.gguf.header import read_gguf_header
from gguf import GGUFWriter

#: Numbers that a damaged header may contain.
EXTREMES = (0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
#: Bytes of memory for each byte of a file, and for the rest of a program.
PER_BYTE, REST = 64, 2**20


def llama(path: Path) -> Path:
    """Write a small Llama with a tokenizer."""
    draw = np.random.default_rng(0).normal
    writer = GGUFWriter(path, "llama")
    for key, value in (("block_count", 1), ("context_length", 64), ("embedding_length", 32)):
        writer.add_uint32(f"llama.{key}", value)
    for key, value in (("feed_forward_length", 32), ("attention.head_count", 2)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(13))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3, *[6] * 13])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    shapes = {"token_embd": (16, 32), "output_norm": (32,), "blk.0.attn_norm": (32,)}
    shapes |= {f"blk.0.attn_{part}": (32, 32) for part in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{part}": (32, 32) for part in ("gate", "up", "down")}
    for name, shape in {**shapes, "blk.0.ffn_norm": (32,)}.items():
        writer.add_tensor(f"{name}.weight", draw(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return llama(tmp_path_factory.mktemp("gguf") / "model.gguf").read_bytes()


def damaged(whole: bytes, rng: np.random.Generator) -> bytes:
    """Return a file with a few wrong bytes, numbers or lengths in its header."""
    content, header = bytearray(whole), whole.index(b"blk.0.ffn_norm") + 64
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, max(1, min(header, len(content) - 8))))
        kind = rng.integers(0, 5)
        if len(content) < 16:
            break
        if kind == 0:
            content[at] = int(rng.integers(0, 256))
        elif kind == 1:
            width, form = ((4, "<I"), (8, "<Q"))[rng.integers(0, 2)]
            value = EXTREMES[rng.integers(0, len(EXTREMES))] % 2 ** (8 * width)
            content[at : at + width] = struct.pack(form, value)
        elif kind == 2:
            del content[at : at + int(rng.integers(1, 16))]
        elif kind == 3:
            content[at:at] = content[: int(rng.integers(1, 64))]
        else:
            del content[int(rng.integers(0, len(content))) :]
    return bytes(content)


def check_damaged(whole: bytes, folder: Path, count: int) -> int:
    """Open damaged files; return how many raise an error."""
    file, refused = folder / "damaged.gguf", 0
    for seed in range(count):
        content = damaged(whole, np.random.default_rng(seed))
        file.write_bytes(content)
        tracemalloc.start()
        try:
            read_gguf_header(file)
            shutil.rmtree(as_directory(file))
        except CheckpointError:
            refused += 1
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < PER_BYTE * len(content) + REST, f"seed {seed}: {peak} bytes"
    return refused


def test_damaged_headers_raise_checkpoint_errors_and_reserve_little_memory(
    whole: bytes, tmp_path: Path
) -> None:
    assert check_damaged(whole, tmp_path, 200) > 100


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_many_damaged_headers_raise_checkpoint_errors(whole: bytes, tmp_path: Path) -> None:
    assert check_damaged(whole, tmp_path, 20_000) > 10_000


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(whole: bytes) -> bytes:
        assert old in whole
        return whole.replace(old, new, 1)

    return change


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda _: b"", "not a whole GGUF file"),
    "another format": (lambda whole: b"PK\x03\x04" + whole[4:], "no GGUF file"),
    "big-endian": (lambda whole: whole[:4] + b"\0\0\0\3" + whole[8:], "big-endian"),
    "version 1": (lambda whole: whole[:4] + b"\1\0\0\0" + whole[8:], "version 1"),
    "many tensors": (lambda w: w[:8] + struct.pack("<Q", 2**40) + w[16:], "tensors"),
    "many entries": (lambda w: w[:16] + struct.pack("<Q", 2**60) + w[24:], "metadata entries"),
    "equal keys": (
        replaced(text("llama.context_length"), text("llama.block_count")),
        "is there twice",
    ),
    "equal tensors": (replaced(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"), "is there twice"),
    "cut": (lambda whole: whole[:-64], "outside the file"),
    "alignment": (
        lambda whole: (
            whole[:16]
            + struct.pack("<Q", struct.unpack("<Q", whole[16:24])[0] + 1)
            + text("general.alignment")
            + struct.pack("<II", 4, 48)
            + whole[24:]
        ),
        "power of two",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_header_names_its_fault(name: str, whole: bytes, tmp_path: Path) -> None:
    change, message = DAMAGES[name]
    file = tmp_path / "model.gguf"
    file.write_bytes(change(whole))
    with pytest.raises(CheckpointError, match=message):
        read_gguf_header(file)


def test_overlapping_tensors_raise_checkpoint_error(whole: bytes, tmp_path: Path) -> None:
    name = text("blk.0.attn_k.weight")
    at = whole.index(name) + len(name) + 4 + 16 + 4
    file = tmp_path / "model.gguf"
    file.write_bytes(whole[:at] + struct.pack("<Q", 0) + whole[at + 8 :])
    with pytest.raises(CheckpointError, match="overlap"):
        read_gguf_header(file)


def test_header_equals_that_of_the_gguf_package(whole: bytes, tmp_path: Path) -> None:
    from gguf import GGUFReader

    file = tmp_path / "model.gguf"
    file.write_bytes(whole)
    header, reader = read_gguf_header(file), GGUFReader(file)
    own = {name for name in reader.fields if not name.startswith("GGUF.")}
    assert header.metadata.keys() == own
    for tensor in reader.tensors:
        location = header.tensors[tensor.name]
        assert location.format == tensor.tensor_type.name
        assert location.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert location.start == tensor.data_offset
