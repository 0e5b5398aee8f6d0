"""OpenVINO as a contender: a process in its own environment, which computes turns on request.

    python -m venv env && env/bin/pip install optimum-intel nncf torch openvino

Set EASYDEL_OPENVINO_PYTHON to that environment's Python. This file is also the program of the
process: it reads one JSON line per turn from the standard input, and answers with one line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tools.bench.llama_cpp import STEPS
from tools.bench.measure import Run, Timed, cores

PYTHON = "EASYDEL_OPENVINO_PYTHON"


class Format(NamedTuple):
    """How a model is stored and computed.

    Attributes:
        bits: of the codes of matrices; None = they are not quantized.
        properties: settings of OpenVINO's compiler. Others have their defaults: with codes, the
            cache has 8 bits, and activations are rounded to 8 bits in groups of 32.
    """

    bits: int | None
    properties: dict[str, str]


FORMATS = {
    "float32": Format(None, {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}),
    "bfloat16": Format(None, {"INFERENCE_PRECISION_HINT": "bf16"}),
    "int8": Format(8, {}),
    "int4": Format(4, {}),
}


class OpenVino:
    """A Llama checkpoint, exported by `optimum-intel`.

    Args:
        checkpoint: directory in Hugging Face layout.
        dtype: a name of FORMATS.
        python: Python of an environment with `optimum-intel`.

    Raises:
        RuntimeError: The process failed.
    """

    def __init__(self, checkpoint: Path, dtype: str, python: str):
        self.log = checkpoint / f"openvino-{dtype}.log"
        command = [python, "-m", "tools.bench.open_vino", str(checkpoint), dtype]
        with self.log.open("w") as log:
            self.process: Any = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.weight_bytes = int(self.answer()["bytes"])
        self.logits = checkpoint / f"openvino-{dtype}.npy"

    def answer(self) -> dict[str, float]:
        """Return the next line of the process."""
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"OpenVINO failed:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)

    def turn(self, tokens: np.ndarray, steps: int) -> dict[str, float]:
        """Return the seconds of a prompt and of one of `steps` steps after it."""
        request = {"tokens": tokens.tolist(), "steps": steps, "logits": str(self.logits)}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.answer()

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        """Return the logits of the last token."""
        self.turn(tokens, 0)
        return np.load(self.logits)

    def prefiller(self, tokens: np.ndarray) -> Run:
        """Return a run that returns the seconds of a prompt."""
        return lambda: Timed(self.turn(tokens, 0)["prompt"])

    def decoder(self, tokens: np.ndarray) -> Run:
        """Return a run that returns the mean seconds of a step after the tokens."""
        return lambda: Timed(self.turn(tokens, STEPS)["decode"])

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait()


class Program:
    """The compiled model in the process.

    Args:
        checkpoint: see `OpenVino`.
        dtype: see `OpenVino`.
    """

    def __init__(self, checkpoint: Path, dtype: str):
        import openvino

        bits, properties = FORMATS[dtype]
        exported = checkpoint / f"openvino-{bits or 'plain'}"
        if not exported.exists():
            export(checkpoint, exported, bits)
        core = openvino.Core()
        model = core.read_model(exported / "openvino_model.xml")
        keep_last_token(model)
        chosen = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": cores(), **properties}
        self.request = core.compile_model(model, "CPU", chosen).create_infer_request()
        size = (exported / "openvino_model.bin").stat().st_size
        self.bytes = size // 2 if dtype == "bfloat16" else size  # the file has float32

    def logits(self, tokens: np.ndarray, past: int) -> np.ndarray:
        """Return the logits of the last token [b, vocab], after `past` tokens in the cache."""
        rows, length = tokens.shape
        positions = np.arange(past, past + length)
        inputs = {
            "input_ids": tokens,
            "attention_mask": np.ones((rows, past + length), np.int64),
            "position_ids": np.broadcast_to(positions, (rows, length)),
            "beam_idx": np.arange(rows, dtype=np.int32),
        }
        return self.request.infer(inputs)[0][:, -1]

    def turn(self, tokens: np.ndarray, steps: int, path: str) -> dict[str, float]:
        """Compute a prompt and some steps, save the logits of the prompt, and return seconds."""
        self.request.reset_state()
        began = time.perf_counter()
        logits = self.logits(tokens, 0)
        prompt = time.perf_counter() - began
        if not steps:
            np.save(path, logits)
        token = logits.argmax(-1)[:, None]
        began = time.perf_counter()
        for step in range(steps):
            token = self.logits(token, tokens.shape[1] + step).argmax(-1)[:, None]
        decode = (time.perf_counter() - began) / max(steps, 1)
        return {"prompt": prompt, "decode": decode}


def export(checkpoint: Path, exported: Path, bits: int | None) -> None:
    """Write a model of OpenVINO, with matrices of codes in groups of 32 if `bits` is given."""
    from optimum import intel

    quantized = None
    if bits is not None:
        groups = {"group_size": 32, "ratio": 1.0} if bits == 4 else {}
        quantized = intel.OVWeightQuantizationConfig(bits=bits, sym=True, **groups)
    model = intel.OVModelForCausalLM.from_pretrained(
        checkpoint,
        export=True,
        compile=False,
        quantization_config=quantized,
        load_in_8bit=None if bits else False,
    )
    model.save_pretrained(exported)


def keep_last_token(model: Any) -> None:
    """Let the head compute the last token only, as `openvino_genai` does."""
    from openvino import opset13

    head = model.output("logits").node.input_value(0).node
    last = opset13.slice(head.input_value(0), [-1], [2**31 - 1], [1], [1])
    head.input(0).replace_source_output(last.output(0))
    model.validate_nodes_and_infer_types()


def main() -> None:
    """Compute the turns that the standard input asks for."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # messages of the libraries go to the log
    program = Program(Path(sys.argv[1]), sys.argv[2])
    print(json.dumps({"bytes": program.bytes}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        tokens = np.array(asked["tokens"], np.int64)
        done = program.turn(tokens, asked["steps"], asked["logits"])
        print(json.dumps(done), file=answers, flush=True)


if __name__ == "__main__":
    main()
