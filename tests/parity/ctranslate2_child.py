"""CTranslate2 in an environment of its own: tokens of a model, and its weights in another type.

    python ctranslate2_child.py tokens MODEL FEATURES.npy PROMPT
    python ctranslate2_child.py transcripts MODEL SAMPLES.npy...
    python ctranslate2_child.py convert MODEL TARGET TYPE

The last command reads the arrays of a file with weights of 32 or 16 bits, and CTranslate2 writes
them with weights of the type. Needs `pip install faster-whisper`.
"""

from __future__ import annotations

import json
import struct
import sys
from importlib import import_module
from pathlib import Path

import numpy as np

TYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)


def generate_tokens(model: str, features: str, prompt: str) -> list[int]:
    ctranslate2 = import_module("ctranslate2")
    whisper = ctranslate2.models.Whisper(model, compute_type="float32", intra_threads=1)
    view = ctranslate2.StorageView.from_array(np.load(features)[None])
    result = whisper.generate(view, [json.loads(prompt)], beam_size=1)[0]
    return result.sequences_ids[0]


def transcribe_files(model: str, *samples: str) -> list[str]:
    library = import_module("faster_whisper")
    whisper = library.WhisperModel(model, device="cpu", compute_type="float32", cpu_threads=1)
    texts = []
    for file in samples:
        segments, _ = whisper.transcribe(np.load(file), language="en", beam_size=1)
        texts.append("".join(segment.text for segment in segments).strip())
    return texts


def read_arrays(file: Path) -> dict[str, np.ndarray]:
    with file.open("rb") as stream:

        def numbers(form: str) -> tuple[int, ...]:
            return struct.unpack(f"<{form}", stream.read(struct.calcsize(f"<{form}")))

        def text() -> str:
            return stream.read(numbers("H")[0])[:-1].decode()

        _ = numbers("I"), text(), numbers("I")
        arrays = {}
        for _ in range(numbers("I")[0]):
            name, axes = text(), numbers("B")[0]
            shape, kind, size = numbers(f"{axes}I"), numbers("B")[0], numbers("I")[0]
            arrays[name] = np.frombuffer(stream.read(size), TYPES[kind]).reshape(shape)
        for _ in range(numbers("I")[0]):
            alias = text()
            arrays[alias] = arrays[text()]
    return arrays


def convert_weights(model: str, target: str, kind: str) -> list[str]:
    arrays = read_arrays(Path(model, "model.bin"))
    layers = [
        len({name.split("/")[1] for name in arrays if name.startswith(f"{stack}/layer_")}) - 1
        for stack in ("encoder", "decoder")
    ]
    heads = [int(arrays[f"{stack}/num_heads"]) for stack in ("encoder", "decoder")]
    spec = import_module("ctranslate2.specs.whisper_spec").WhisperSpec(
        layers[0], heads[0], layers[1], heads[1]
    )
    for name, array in arrays.items():
        if array.ndim == 0:
            continue
        *parts, last = name.split("/")
        module = spec
        for part in parts:
            head, _, number = part.rpartition("_")
            group = getattr(module, head, None) if number.isdigit() else None
            module = group[int(number)] if isinstance(group, list) else getattr(module, part)
        setattr(module, last, array.astype(np.float32))
    text = Path(model, "vocabulary.txt").read_text(encoding="utf-8")
    spec.register_vocabulary(text.removesuffix("\n").split("\n"))
    settings = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))
    for name, value in settings.items():
        setattr(spec.config, name, value)
    spec.validate()
    spec.optimize(quantization=kind)
    Path(target).mkdir(parents=True, exist_ok=True)
    spec.save(target)
    return sorted(path.name for path in Path(target).iterdir())


COMMANDS = {"tokens": generate_tokens, "transcripts": transcribe_files, "convert": convert_weights}

if __name__ == "__main__":
    command, *words = sys.argv[1:]
    print(json.dumps(COMMANDS[command](*words)))
