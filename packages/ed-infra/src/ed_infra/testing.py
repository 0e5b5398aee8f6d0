"""Helpers for the tests of several packages. The packages do not import this module."""

from __future__ import annotations

import base64
import hashlib
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

#: A Llama that is built and compiled in seconds; grouped-query attention, dimensions that divide
#: over meshes of 2, 4 and 8 devices.
TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: The scaling of Llama 3.1, with lengths that a tiny model reaches.
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write_package(root: pathlib.Path, name: str, files: Mapping[str, bytes]) -> None:
    """Write an installed package: its files, and the metadata with their hashes.

    Files that end with `plain.txt` have no hash.
    """
    info = root / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    lines = []
    for path, content in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        known = "," if path.endswith("plain.txt") else f"sha256={digest},{len(content)}"
        lines.append(f"{path},{known}")
    modules = sorted({path.partition("/")[0] for path in files})
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "top_level.txt").write_text("\n".join(modules))
    (info / "RECORD").write_text("\n".join([*lines, f"{info.name}/RECORD,,"]) + "\n")


def tiny_llama(**changes: object) -> dict[str, Any]:
    """Return the fields of a tiny Llama, some of them changed."""
    return {**TINY_LLAMA, **changes}


def require_torch() -> Any:
    """Return torch, or skip the test that calls this (and count it: the marker is `torch`)."""
    import pytest

    return pytest.importorskip("torch", reason="torch is not installed: no comparison with it")


def english_topics() -> dict[str, str]:
    """Return English text from the standard library: topic -> text of `pydoc_data.topics`."""
    from pydoc_data.topics import topics

    return dict(topics)


def random_hf_llama(
    directory: str | os.PathLike[str],
    *,
    seed: int = 0,
    max_shard_size: str | int = "5GB",
    scale: float = 3.0,
    **config: object,
) -> pathlib.Path:
    """Save a Llama with random weights, made by torch transformers, and return its directory.

    Args:
        directory: where to; made if missing.
        seed: of the weights.
        max_shard_size: as in `transformers`; a small size makes several files and an index.
        scale: factor of the weight matrices over the usual initialization, so that attention is
            far from uniform and mistakes show.
        config: fields of the tiny Llama to change.
    """
    torch = require_torch()
    import transformers

    torch.manual_seed(seed)
    fields = tiny_llama(**config)
    fields.pop("model_type")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # all ones at first: a norm that is ignored would not show
                weight.add_(0.2 * torch.randn_like(weight))
            else:
                weight.mul_(scale)
    path = pathlib.Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path


def hf_logits(directory: str | os.PathLike[str], input_ids: object, **inputs: object) -> Any:
    """Return the float32 logits [b, s, v] of torch transformers on int [b, s], as numpy."""
    torch = require_torch()
    import numpy as np
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.eval()
    tensors = {name: torch.tensor(np.asarray(value)) for name, value in inputs.items()}
    with torch.no_grad():
        output = model(input_ids=torch.tensor(np.asarray(input_ids)), **tensors)
    return output.logits.float().numpy()


def run_processes(
    command: Sequence[str | os.PathLike[str]],
    logs: str | os.PathLike[str],
    *,
    processes: int = 2,
    devices: int = 4,
    timeout: float = 300,
) -> None:
    """Run a Python program as the processes of one run, each with simulated CPU devices.

    They answer through files: collectives of the CPU print on stdout.

    Args:
        command, logs, processes, devices: see `started_processes`.
        timeout: seconds, for all.

    Raises:
        AssertionError: a process failed or did not end, with the end of its log. The others, which
            would wait for it, are ended.
    """
    deadline = time.monotonic() + timeout
    with started_processes(command, logs, processes=processes, devices=devices) as running:
        while any(process.poll() is None for process in running):
            if any(process.poll() for process in running) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        ended = [process.poll() for process in running]
    for index, code in enumerate(ended):
        if code:
            text = (pathlib.Path(logs) / f"process_{index}.log").read_text(errors="replace")
            raise AssertionError(f"process {index} ended with {code}:\n{text[-4000:]}")
    if None in ended:
        raise AssertionError(f"processes did not end in {timeout} s (exit codes so far: {ended})")


@contextmanager
def started_processes(
    command: Sequence[str | os.PathLike[str]],
    logs: str | os.PathLike[str],
    *,
    processes: int = 2,
    devices: int = 4,
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a Python program as the processes of one run; after the block none of them is left.

    `ed_infra.distributed.initialize()` joins them.

    Args:
        command: arguments of `python`: `["-c", code, ...]`, `["-m", module, ...]`, or a file.
        logs: directory for the output of the processes, `process_<i>.log`; created if missing.
        processes: number of processes.
        devices: number of simulated CPU devices of each process.
    """
    folder = pathlib.Path(logs)
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    # XLA uses the last value of a flag. The other flags stay, so that each process compiles the
    # same programs as this one.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags.strip(),
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(processes),
    }
    running: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(processes):
            with open(folder / f"process_{index}.log", "wb") as log:
                running.append(
                    subprocess.Popen(
                        [sys.executable, *map(str, command)],
                        env={**environment, "JAX_PROCESS_ID": str(index)},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()
