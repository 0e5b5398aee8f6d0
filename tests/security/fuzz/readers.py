"""Fuzzers of readers of files: vocabularies of GGUF files, run files, and rows with media."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from ed_data import DataError, Inform, documents
from ed_data.config.source import FILE_TYPES
from ed_data.rows.recordings import header
from ed_data.schema import CTC, IMAGE_CLASSIFICATION, TEXT
from ed_data.sources import open_source
from ed_data.tokens.images import get_size
from ed_elarge.config.nodes import read_yaml
from ed_elarge.config.normalize import normalize
from ed_elarge.errors import InputError
from ed_infra.errors import CheckpointError, ConfigError
from ed_models.checkpoints.ctranslate2_files import CTranslate2Files
from ed_models.checkpoints.ctranslate2_folder import (
    is_ctranslate2_folder,
    write_ctranslate2_settings,
)
from ed_models.checkpoints.gguf.directory import as_directory
from ed_models.checkpoints.gguf.header import read_gguf_header

from tests.security.fuzz.mutations import mutate_bytes, mutate_json, mutate_text, write_json
from tests.security.fuzz.targets import SEEDS, Finding, Target, check, read_seeds

#: Maximum characters of an error message.
MAX_TEXT = 2**16
EXAMPLES = Path(__file__).parents[3] / "examples"


def shorten(error: BaseException) -> str:
    """Return the kind and the beginning of an error without its details."""
    text = str(error)
    check(len(text) < MAX_TEXT, f"a message of {len(text)} characters")
    return f"{type(error).__name__} {re.sub(r'[0-9]+|[^ ]{30,}', '#', text)[-120:]}"


class Vocabulary(Target):
    """The vocabulary of a GGUF file, from its header to the tokens of a text.

    A case is the fields of a header as JSON, or the bytes of a file.
    """

    name = "gguf_vocabulary"

    @contextmanager
    def running(self, folder: Path) -> Iterator[object]:
        self._file = folder / "model.gguf"
        yield None

    def load_seeds(self) -> list[Any]:
        return [json.loads(data) for data in read_seeds(self.name)]

    def mutate(self, rng: random.Random, corpus: Sequence[Any]) -> Any:
        case = rng.choice(corpus)
        if isinstance(case, bytes):
            return mutate_bytes(case, rng)
        if rng.random() < 0.3:
            data = self._build(case)
            # The vocabulary is before the tensors.
            return mutate_bytes(data, rng) if data is not None else case
        key = rng.choice(list(case) or [""])
        others = [other[key] for other in corpus if isinstance(other, dict) and key in other]
        if not isinstance(case, dict) or key not in case:
            return case
        return {**case, key: mutate_json(case[key], rng, others)}

    def execute(self, case: Any) -> str:
        data = case if isinstance(case, bytes) else self._build(case)
        if data is None:
            return "no file"
        self._file.write_bytes(data)
        folder = None
        try:
            read_gguf_header(self._file)
            folder = as_directory(self._file)
            return self._encode(folder)
        except (CheckpointError, ConfigError) as error:
            return shorten(error)
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def _encode(self, folder: Path) -> str:
        from transformers import PreTrainedTokenizerFast

        if not (folder / "tokenizer.json").is_file():
            return "no tokenizer"
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        text = "Hello, wörld 🌍 123\n  <s>"
        tokens = tokenizer(text)["input_ids"]
        check(len(tokens) < 100 * len(text), f"{len(tokens)} tokens")
        tokenizer.decode(tokens)
        return "read"

    def _build(self, fields: dict[str, Any]) -> bytes | None:
        """Return the file of header fields; None if no file can have the fields."""
        from gguf import GGUFWriter

        writer = GGUFWriter(self._file, "llama")
        try:
            for key, value in (
                ("block_count", 1),
                ("context_length", 64),
                ("embedding_length", 32),
            ):
                writer.add_uint32(f"llama.{key}", value)
            for key, value in (("feed_forward_length", 32), ("attention.head_count", 2)):
                writer.add_uint32(f"llama.{key}", value)
            writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
            for key, value in fields.items():
                name = f"tokenizer.{key}"
                if isinstance(value, bool):
                    writer.add_bool(name, value)
                elif isinstance(value, int):
                    writer.add_uint32(name, value)
                elif isinstance(value, float):
                    writer.add_float32(name, value)
                elif isinstance(value, str):
                    writer.add_string(name, value)
                elif isinstance(value, list):
                    writer.add_array(name, value)
            tokens = fields.get("ggml.tokens")
            count = min(len(tokens), 4096) if isinstance(tokens, list) else 16
            shapes = {"token_embd": (count, 32), "output_norm": (32,), "blk.0.attn_norm": (32,)}
            shapes |= {f"blk.0.attn_{part}": (32, 32) for part in ("q", "k", "v", "output")}
            shapes |= {f"blk.0.ffn_{part}": (32, 32) for part in ("gate", "up", "down")}
            for name, shape in {**shapes, "blk.0.ffn_norm": (32,)}.items():
                writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        except (ValueError, TypeError, OverflowError, IndexError, UnicodeError):
            return None  # the writer has no form for the value
        except Exception as error:
            if type(error).__name__ != "error":  # of struct, for numbers beyond the type
                raise
            return None
        finally:
            writer.close()
        return self._file.read_bytes()


class RunFiles(Target):
    """Run files: YAML, merges, included files, and the checks of all keys."""

    name = "run_files"

    @contextmanager
    def running(self, folder: Path) -> Iterator[object]:
        self._file = folder / "run.yaml"
        for path in (SEEDS / self.name).iterdir():
            shutil.copy(path, folder / path.name)
        yield None

    def load_seeds(self) -> list[Any]:
        names = ("sft", "grpo", "serve", "dpo", "quickstart", "pretrain")
        return [*read_seeds(self.name), *((EXAMPLES / f"{n}.yaml").read_bytes() for n in names)]

    def mutate(self, rng: random.Random, corpus: Sequence[Any]) -> Any:
        data = rng.choice(corpus)
        if rng.random() < 0.3:
            return mutate_bytes(data, rng, corpus)
        text = data.decode("utf-8", "replace")
        if rng.random() < 0.4:
            return mutate_text(text, rng).encode("utf-8", "surrogatepass")
        try:
            value = yaml.safe_load(text)
            changed = mutate_json(value, rng)
            return yaml.safe_dump(changed, allow_unicode=True).encode("utf-8", "surrogatepass")
        except (yaml.YAMLError, ValueError, RecursionError, TypeError):
            return mutate_bytes(data, rng, corpus)

    def execute(self, case: Any) -> str:
        self._file.write_bytes(case)
        try:
            normalize(read_yaml(self._file), require_actions=True)
        except InputError as error:
            return shorten(error)
        return "valid"


class MediaRows(Target):
    """Rows with images and recordings: nothing outside of their folder is opened or called.

    A case is the text of a file of rows.
    """

    name = "media_rows"
    _hooked = False
    _active: MediaRows | None = None

    @contextmanager
    def running(self, folder: Path) -> Iterator[object]:
        self._inside = folder / "rows"
        (self._inside / "media").mkdir(parents=True)
        for path in (SEEDS / "images").glob("*.png"):
            shutil.copy(path, self._inside / "media" / "x.png")
        for path in (SEEDS / "audio").glob("*.wav"):
            shutil.copy(path, self._inside / "media" / "x.wav")
        shutil.copy(self._inside / "media" / "x.png", folder / "secret.png")
        (self._inside / "link.png").symlink_to(folder / "secret.png")
        self._secret, self._forbidden = str(folder / "secret.png"), list[str]()
        if not MediaRows._hooked:  # a hook stays for ever
            sys.addaudithook(_watch)
            MediaRows._hooked = True
        try:
            yield None
        finally:
            MediaRows._active = None

    def load_seeds(self) -> list[Any]:
        return read_seeds(self.name)

    def mutate(self, rng: random.Random, corpus: Sequence[Any]) -> Any:
        data = rng.choice(corpus)
        if rng.random() < 0.1:
            return mutate_bytes(data, rng, corpus)
        try:
            rows = [json.loads(line) for line in data.splitlines() if line.strip()]
            others = [json.loads(line) for other in corpus for line in other.splitlines()[:1]]
        except ValueError:
            return mutate_bytes(data, rng, corpus)
        if not rows:
            return rng.choice(corpus)
        place = rng.randrange(len(rows))
        rows[place] = mutate_json(rows[place], rng, others)
        return b"\n".join(write_json(row, rng) for row in rows)

    def execute(self, case: Any) -> str:
        file = self._inside / "rows.jsonl"
        file.write_bytes(case)
        self._forbidden.clear()
        MediaRows._active = self
        outcomes = []
        try:
            for schema in (IMAGE_CLASSIFICATION, CTC, TEXT):
                outcomes.append(self._read(file, schema))
        finally:
            MediaRows._active = None
        check(not self._forbidden, f"the rows reached {self._forbidden[:5]}")
        return " / ".join(outcomes)

    def _read(self, file: Path, schema: Any) -> str:
        count = 0
        try:
            for example in documents(Inform(data_files=str(file)), schema=schema):
                for image in example.images:
                    get_size(image)
                for recording in example.recordings:
                    header(recording)
                count += 1
        except DataError as error:
            return shorten(error)
        return f"{count} rows"

    def watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Record an event that no row may cause."""
        if event in ("socket.connect", "subprocess.Popen", "os.system", "socket.getaddrinfo"):
            self._forbidden.append(f"{event} {arguments!r}"[:200])
            raise Finding(event)
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            hidden = path.startswith(("/etc/pass", "/etc/shadow", "/root/", "/home/"))
            library = path.startswith((sys.prefix, sys.base_prefix))
            if path == self._secret or (hidden and not library):
                self._forbidden.append(f"open {path}"[:200])


class DataFiles(Target):
    """Files of rows in every format and compression. A case is the name and the bytes of a file."""

    name = "data_files"
    #: Rows that are read of a case.
    _rows = 2000

    @contextmanager
    def running(self, folder: Path) -> Iterator[object]:
        self._folder = folder / "rows"
        self._folder.mkdir()
        yield None

    def load_seeds(self) -> list[Any]:
        return [(path.name, path.read_bytes()) for path in sorted((SEEDS / self.name).iterdir())]

    def mutate(self, rng: random.Random, corpus: Sequence[Any]) -> Any:
        name, data = rng.choice(corpus)
        if rng.random() < 0.5 and name.endswith(".gz"):
            with suppress(OSError, EOFError, zlib.error):
                return name, gzip.compress(mutate_bytes(gzip.decompress(data), rng))
        return name, mutate_bytes(data, rng, [other for _, other in corpus])

    def execute(self, case: Any) -> str:
        name, data = case
        path = self._folder / name
        path.write_bytes(data)
        words = name.split(".")
        kind = next(known for known, suffixes in FILE_TYPES.items() if f".{words[1]}" in suffixes)
        count = 0
        try:
            for _ in islice(
                open_source(Inform(type=kind, data_files=str(path))).rows(), self._rows
            ):
                count += 1
        except DataError as error:
            check(name in str(error), f"a message without the name of the file: {error}")
            return f"{name} {shorten(error)}"
        finally:
            path.unlink()
        return f"{name} {count} rows"

    def size(self, case: Any) -> int:
        return len(case[1])


class CTranslate2(Target):
    """A Whisper in CTranslate2's layout, from its folder to the values of its tensors.

    A case is the content of `model.bin`, `config.json` and `vocabulary.json`.
    """

    name = "ctranslate2"
    _names = ("model.bin", "config.json", "vocabulary.json")
    #: Bytes of a tensor whose values are read.
    _most_read = 2**20

    @contextmanager
    def running(self, folder: Path) -> Iterator[object]:
        self._folder = folder / "whisper"
        self._folder.mkdir()
        yield None

    def load_seeds(self) -> list[Any]:
        folder = SEEDS / self.name
        texts = [(folder / name).read_bytes() for name in self._names[1:]]
        return [(path.read_bytes(), *texts) for path in sorted(folder.glob("*.bin"))]

    def mutate(self, rng: random.Random, corpus: Sequence[Any]) -> Any:
        case = [*rng.choice(corpus)]
        place = 0 if rng.random() < 0.6 else rng.randrange(1, len(case))
        others = [other[place] for other in corpus]
        if place and rng.random() < 0.7:
            with suppress(ValueError, RecursionError):
                case[place] = write_json(mutate_json(json.loads(case[place]), rng), rng)
                return tuple(case)
        case[place] = mutate_bytes(case[place], rng, others)
        return tuple(case)

    def execute(self, case: Any) -> str:
        for name, data in zip(self._names, case, strict=True):
            (self._folder / name).write_bytes(data)
        settings: Path | None = None
        try:
            if not is_ctranslate2_folder(self._folder):
                return "another folder"
            settings = write_ctranslate2_settings(self._folder)
            tensors = CTranslate2Files.open(self._folder / self._names[0])
            for name, entry in tensors.items():
                if entry.stop - entry.start <= self._most_read:
                    values = tensors.read(name)
                    check(values.shape == entry.shape, f"{name} has another shape")
            return f"{len(tensors)} tensors"
        except (CheckpointError, ConfigError) as error:
            return shorten(error)
        finally:
            if settings is not None:
                shutil.rmtree(settings, ignore_errors=True)

    def size(self, case: Any) -> int:
        return sum(map(len, case))


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if MediaRows._active is not None:
        MediaRows._active.watch(event, arguments)
