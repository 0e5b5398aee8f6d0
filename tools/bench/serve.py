"""Compare servers on the same checkpoint in one run: ours, transformers', llama.cpp's and vLLM's.

    python -m tools.bench.serve --llama-server build/bin/llama-server
    python -m tools.bench.serve --clients 1 8 --layers 4 --tokens 16 --rounds 1
    python -m tools.bench.serve --only ours vllm --vllm-python vllm/bin/python --dtype bfloat16
    python -m tools.bench.serve --only ours --streams
    python -m tools.bench.serve --only ours --replicas 1 2 --prompt 256 --heads 8 --clients 16
    python -m tools.bench.serve --shape llama-1b --dtype bfloat16 --clients 1 32 128   on a GPU

By default SmolLM2-135M's shape in float32, with random weights, greedy. All servers run during the
whole comparison, and their loads are interleaved. The clients are one process with plain sockets,
so that their cost is the same for all servers. A cell summarizes all requests of all rounds.
llama.cpp reads the GGUF file that `tools.bench.llama_cpp` writes from the checkpoint; without its
server the contender is omitted. vLLM runs in its own environment, whose Python is `--vllm-python`
or `EASYDEL_VLLM_PYTHON`. On a CPU, vLLM's default leaves one core to its scheduler; the benchmark
gives it all cores, like the other servers. The variables `VLLM_CPU_OMP_THREADS_BIND`,
`VLLM_CPU_KVCACHE_SPACE` and `LD_PRELOAD` of the caller override its choices.

`--replicas` adds a contender for each number: our server with so many processes, which share the
cores. With `--heads N`, three quarters of each prompt are one of N beginnings.

`--streams` compares the time of streamed answers with that of `eSurge.generate` on the same
prompts, for this shape and for that of pretrain.yaml. A step of the latter has a duration of about
one millisecond, so its ratio shows the cost of the server more clearly.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.bench.decode import SHAPES, VOCAB
from tools.bench.measure import command_line, machine, table, torch_device
from tools.bench.sse import Load, load

MODEL_LEN = 512
#: The model of examples/pretrain.yaml.
PRETRAIN: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}
STREAMED = {"135M": ({**SHAPES["llama"]}, VOCAB), "pretrain.yaml's": (PRETRAIN, 2048)}
# Seconds for a server to load the model; our server also compiles it in this time.
PATIENCE = 600
# Seconds between loads: OpenMP's threads wait actively for 0.2 s after their last work.
PAUSE = 1.0
#: Name of our server's metric with the number of programs that are not compiled yet.
PENDING = "esurge:programs_pending{"


def save(directory: Path, shape: dict[str, Any], vocab: int) -> None:
    """Write a torch checkpoint with random weights and a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    # Without an end token, every request generates all requested tokens.
    config = LlamaConfig(**shape, vocab_size=vocab, bos_token_id=None, eos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer(vocab).save_pretrained(directory)


def tokenizer(vocab: int) -> Any:
    """Return the tokenizer of `tools.bench.llama_cpp`: text as bytes, other ids as words."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    bare = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = [*bare, *(f"\u2581t{word}" for word in range(vocab - len(bare)))]
    ids = {piece: index for index, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(ids, [], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


@contextlib.contextmanager
def running(command: Sequence[str], port: int, log: Path) -> Iterator[str]:
    """Run a server in a separate process and yield its URL as soon as the server answers.

    Raises:
        RuntimeError: The server does not answer.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        deadline = time.monotonic() + PATIENCE
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(command)} does not answer")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_programs(url: str) -> None:
    """Wait until our server has compiled all programs. The server answers earlier, but compilation
    in the background would slow down all servers."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{url.removesuffix('/v1')}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        if all(float(line.split()[-1]) == 0 for line in lines if line.startswith(PENDING)):
            return
        time.sleep(1)
    raise RuntimeError(f"{url} still compiles programs after {PATIENCE} s")


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def commands(
    options: argparse.Namespace, directory: Path, folder: Path
) -> dict[str, tuple[list[str], int]]:
    """Return the command and the port of each contender."""
    most, ports = max(options.clients), iter(free_port, None)
    python, found = sys.executable, {}
    local = ["--host", "127.0.0.1", "--port"]
    for count in options.replicas if "ours" in options.only else ():
        port = next(ports)
        flags = ["--max-num-seqs", str(most), "--max-model-len", str(MODEL_LEN)]
        ours = [python, "-m", "ed_esurge", "serve", str(directory), *local, str(port)]
        flags += ["--dtype", options.dtype, "--log-level", "warning"]
        flags += ["--data-parallel-size", str(count)] if count > 1 else []
        found["ours" if count == 1 else f"ours, {count} replicas"] = ([*ours, *flags], port)
    if "transformers" in options.only:
        # Without the option, requests run one after another; with it, they share steps.
        pages = ["--cb-block-size", "32", "--cb-num-blocks", str(most * MODEL_LEN // 32)]
        batching = ["--continuous-batching", *pages, "--cb-max-batch-tokens", "512"]
        for name, flags in (("", []), (", continuous batching", batching)):
            port = next(ports)
            theirs = [python, "-m", "transformers.cli.transformers", "serve", str(directory)]
            theirs += [*local, str(port), "--device", torch_device(), "--dtype", options.dtype]
            theirs += flags
            found["transformers" + name] = (theirs, port)
    if "vllm" in options.only:
        if options.vllm_python is None or not options.vllm_python.exists():
            print(f"vllm is omitted: --vllm-python is {options.vllm_python}")
        else:
            port = next(ports)
            flags = ["--max-num-seqs", str(most), "--max-model-len", str(MODEL_LEN)]
            flags += ["--dtype", options.dtype, "--no-enable-prefix-caching"]
            # The program `vllm` needs a distribution of this name; the CPU build has another one.
            theirs = [str(options.vllm_python), "-m", "vllm.entrypoints.openai.api_server"]
            theirs += ["--model", str(directory), *local, str(port), *flags]
            found["vllm"] = (["env", *vllm_settings(options.vllm_python), *theirs], port)
    if "llama.cpp" in options.only:
        server = options.llama_server
        if server is None or not server.exists():
            print(f"llama.cpp is omitted: --llama-server is {server}")
            return found
        gguf = options.gguf
        if gguf is None:
            from tools.bench.llama_cpp import write_gguf

            gguf = folder / "model.gguf"
            write_gguf(directory, gguf, {"float32": "f32", "bfloat16": "bf16"}[options.dtype])
        port = next(ports)
        cores = len(os.sched_getaffinity(0))
        theirs = [str(server), "-m", str(gguf), *local, str(port), "-t", str(cores)]
        theirs += ["-np", str(most), "-c", str(most * MODEL_LEN)]
        found["llama.cpp"] = (theirs, port)
    return found


def vllm_settings(python: Path) -> list[str]:
    """Return the assignments of environment variables for vLLM on a CPU; set variables win."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    chosen = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "4"}
    openmp = python.parent.parent / "lib" / "libiomp5.so"  # vLLM recommends to load it first
    if openmp.exists():
        chosen["LD_PRELOAD"] = str(openmp)
    return [f"{name}={os.environ.get(name, value)}" for name, value in chosen.items()]


def bodies(
    name: str, draw: random.Random, count: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return requests for a contender: prompts of `--prompt` bytes, with `--heads` beginnings."""
    body = {"max_tokens": options.tokens, "temperature": 0.0, "stream": True}
    if not name.startswith("transformers"):  # transformers rejects unknown fields
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}

    def text(length: int) -> str:
        return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=length))

    head = options.prompt * 3 // 4 if options.heads else 0
    heads = [text(head) for _ in range(options.heads or 1)]
    prompts = [draw.choice(heads) + text(options.prompt - head) for _ in range(count)]
    return [{**body, "prompt": prompt} for prompt in prompts]


def compare(options: argparse.Namespace) -> str:
    """Run all servers under the same loads, and return a table."""
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        directory = folder / "smol"
        shape = {**SHAPES[options.shape]}
        shape["num_hidden_layers"] = options.layers or shape["num_hidden_layers"]
        save(directory, shape, VOCAB)
        urls: dict[str, str] = {}
        for contender, (command, port) in commands(options, directory, folder).items():
            log = folder / f"{len(urls)}.log"
            try:
                urls[contender] = stack.enter_context(running(command, port, log))
                load(urls[contender], bodies(contender, random.Random(1), 2, options), 2)  # warm-up
                if contender.startswith("ours"):
                    wait_for_programs(urls[contender])
            except RuntimeError as error:
                tail = log.read_text(errors="replace")[-1500:]
                print(f"{contender} is omitted: {error}\n{tail}", file=sys.stderr)
                urls.pop(contender, None)
        for clients in options.clients:
            loads: dict[str, list[Load]] = {contender: [] for contender in urls}
            for turn in range(options.rounds):
                for contender, url in urls.items():
                    draw = random.Random(1000 * clients + turn)
                    asked = bodies(contender, draw, max(clients, options.requests), options)
                    time.sleep(PAUSE)
                    loads[contender].append(load(url, asked, clients))
            rows += [_row(contender, clients, of) for contender, of in loads.items()]
    header = ["", "clients", "tokens/s"]
    header += ["first token, ms (p95)", "between tokens, ms (p95)"]
    return table(header, rows)


def _row(contender: str, clients: int, loads: list[Load]) -> list[str]:
    answers = [answer for one in loads for answer in one.answers]
    whole = Load(sum(one.seconds for one in loads), answers)
    cells = [
        f"{whole.percentile(part, 50):.1f} ({whole.percentile(part, 95):.1f})"
        for part in ("first", "between")
    ]
    return [contender, str(clients), f"{whole.tokens_per_second:.1f}", *cells]


def streams(options: argparse.Namespace) -> str:
    """Compare streamed answers with `eSurge.generate` in interleaved runs, and return a table."""
    rows = []
    for name, (shape, vocab) in STREAMED.items():
        own, streamed = _streamed(shape, vocab, options)
        per_step = [f"{value * 1e3 / options.tokens:.2f}" for value in (own, streamed)]
        rows.append([name, str(options.streams), *per_step, f"{streamed / own:.2f}"])
    header = ["model", "clients", "engine, ms a token", "streams, ms a token", "ratio"]
    return table(header, rows)


def _streamed(shape: dict[str, Any], vocab: int, options: argparse.Namespace) -> list[float]:
    """Return the median seconds of the engine for prompts, and of streams of the same prompts."""
    from ed_esurge import SamplingParams, eSurge
    from ed_esurge.server import background
    from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

    if options.layers is not None:
        shape = {**shape, "num_hidden_layers": options.layers}
    layout = {"sharding_axis_dims": (1, 1, 1, 1, 1), "scan_layers": False}
    config = LlamaConfig(**shape, **layout, vocab_size=vocab, eos_token_id=None)
    pieces = tokenizer(vocab)
    # Compile everything first: streams start one by one, in shapes that `generate` never uses.
    engine = eSurge(
        LlamaForCausalLM.create(config, seed=0),
        pieces,
        max_num_seqs=options.streams,
        max_model_len=MODEL_LEN,
        enable_prefix_caching=False,
        silent_mode=True,
    )
    asked = bodies("ours", random.Random(0), options.streams, options)
    prompts = [pieces(body["prompt"])["input_ids"] for body in asked]
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens)
    own, streamed = [], []
    with background(engine) as url:
        for _ in range(options.rounds + 1):
            began = time.perf_counter()
            engine.generate(prompts, params)
            own.append(time.perf_counter() - began)
            streamed.append(load(url, asked, options.streams).seconds)
    return [
        statistics.median(seconds[1:]) for seconds in (own, streamed)
    ]  # the first round warms up


def main() -> None:
    parser = command_line("serve", __doc__)
    add, names = parser.add_argument, ["ours", "transformers", "vllm", "llama.cpp"]
    add("--only", nargs="+", choices=names, default=names)
    add("--clients", type=int, nargs="+", default=[1, 8, 32])
    add("--requests", type=int, default=4, help="per round; each client sends at least one")
    add("--rounds", type=int, default=2)
    add("--prompt", type=int, default=64, help="prompt length in bytes (= tokens)")
    add("--tokens", type=int, default=32)
    add("--heads", type=int, default=0, help="number of common beginnings of the prompts")
    add("--replicas", type=int, nargs="+", default=[1], help="processes of our servers")
    add("--shape", choices=["llama", "llama-1b"], default="llama")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--layers", type=int, help="number of layers; default: the shape's")
    add("--llama-server", type=Path, help="llama.cpp's program")
    python = os.environ.get("EASYDEL_VLLM_PYTHON")
    add("--vllm-python", type=Path, default=python, help="Python of an environment with vLLM")
    add("--gguf", type=Path, help="the checkpoint for llama.cpp; default: converted")
    add("--streams", type=int, nargs="?", const=16, help="clients; instead of the servers")
    options = parser.parse_args()
    print(f"{machine()}; load {os.getloadavg()[0]:.1f}\n")
    print(streams(options) if options.streams else compare(options))


if __name__ == "__main__":
    main()
