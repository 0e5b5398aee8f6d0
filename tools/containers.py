"""Build the images of docker/, train a tiny model in one, and serve it with the other.

    uv run python -m tools.containers                 needs Docker; a few minutes
    uv run python -m tools.containers --jax cuda13    images for NVIDIA GPUs; not tried without one

The nightly workflow runs this script; `.ci/run` checks the Dockerfiles with hadolint.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ("train", "serve")
#: Seconds in which the server must answer; the first start compiles its programs.
START_SECONDS = 300.0
#: A model with one layer, two steps, and text of the Python standard library.
RUN = """
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1,
           num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 128}
  tokenizer: {train: {vocab_size: 320}}
loader: {dtype: fp32, param_dtype: fp32}
mixture:
  informs: [{type: python, data_files: "pydoc_data.topics:topics"}]
  pack_tokens: true
  pack_seq_length: 64
trainer: {trainer_type: sft, max_training_steps: 2, total_batch_size: 2, save_directory: run}
"""


class ContainerError(Exception):
    """An image does not build, train or serve."""


def run_docker(*words: str) -> str:
    """Run docker, show its errors, and return its output.

    Raises:
        ContainerError: the command failed.
    """
    command = ["docker", *words]
    print("+", " ".join(command), flush=True)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ContainerError(f"{' '.join(command[:3])} ended with {done.returncode}")
    return done.stdout.strip()


def build_images(jax: str) -> None:
    """Build both images for an accelerator: empty for CPUs, `cuda12`, `cuda13` or `tpu`."""
    for name in IMAGES:
        file = f"docker/{name}.Dockerfile"
        run_docker("build", "-f", file, "--build-arg", f"JAX={jax}", "-t", f"easydel-{name}", ".")


def train_model(folder: Path) -> None:
    """Train a tiny model in the image `train`, and write it to `folder/run/model`."""
    (folder / "run.yaml").write_text(RUN)
    # The files belong to the user of this machine, who has no home in the image.
    user = ("--user", f"{os.getuid()}:{os.getgid()}", "-e", "HOME=/tmp")
    mount = ("-v", f"{folder}:/workspace")
    run_docker("run", "--rm", *user, *mount, "easydel-train", "elarge", "train", "run.yaml")
    if not (folder / "run/model/config.json").exists():
        raise ContainerError("the image train wrote no model")


def ask_server(address: str, deadline: float) -> str:
    """Return the text of a completion, after the server has started.

    Raises:
        ContainerError: no answer until `deadline`, a time of `time.monotonic`.
    """
    body = json.dumps({"model": "tiny", "prompt": "The", "max_tokens": 4}).encode()
    request = urllib.request.Request(
        f"http://{address}/v1/completions", body, {"Content-Type": "application/json"}
    )
    problem: Exception = ContainerError("not asked")
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["choices"][0]["text"]
        except urllib.error.HTTPError as error:
            raise ContainerError(f"the server refused the request: {error.read()!r}") from error
        except OSError as error:
            problem = error
            time.sleep(1)
    raise ContainerError(f"the image serve did not answer: {problem}")


def serve_model(folder: Path) -> str:
    """Serve the model of `folder` with the image `serve`, and return its answer."""
    mount = f"{folder}/run/model:/model:ro"
    words = ("run", "-d", "--rm", "-v", mount, "-p", "127.0.0.1:0:8000", "easydel-serve")
    container = run_docker(*words, "/model", "--served-model-name", "tiny")
    try:
        address = run_docker("port", container, "8000").splitlines()[0]
        return ask_server(address, time.monotonic() + START_SECONDS)
    finally:
        run_docker("stop", container)


def main(words: list[str] | None = None) -> int:
    """Build and try the images, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jax", default="", choices=["", "cuda12", "cuda13", "tpu"])
    options = parser.parse_args(words)
    try:
        if shutil.which("docker") is None:
            raise ContainerError("docker is not installed")
        build_images(options.jax)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            train_model(folder)
            print("the image serve answered:", repr(serve_model(folder)))
    except ContainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
