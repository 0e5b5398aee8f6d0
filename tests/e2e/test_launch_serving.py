"""`elarge launch` of a file that only serves: replicas in processes, and a mesh over processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from ed_esurge.testing import byte_tokenizer
from ed_infra.testing import tiny_llama
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.xdist_group("several_processes"),
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc"),
]

RUN = """\
model: {name_or_path: model}
sharding: {axis_dims: [1, 1, 1, -1, 1]}
esurge: {max_model_len: 64, max_num_seqs: 2, page_size: 16, compile_runner: false,
  silent_mode: true}
actions: [{serve: {port: 0, data_parallel_size: REPLICAS}}]
"""
ELARGE = str(Path(sys.executable).parent / "elarge")


@pytest.mark.parametrize(("replicas", "processes"), [(2, 1), (1, 2)])
def test_launched_server_of_several_processes_answers_and_ends(
    tmp_path: Path, replicas: int, processes: int
) -> None:
    fields = tiny_llama(vocab_size=260, num_hidden_layers=2)
    fields.pop("model_type")
    LlamaForCausalLM.create(LlamaConfig(**fields), seed=1).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "run.yaml").write_text(RUN.replace("REPLICAS", str(replicas)))
    words = [ELARGE, "launch", "run.yaml", "--on", "local", "--processes-per-host", str(processes)]
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    log = tmp_path / "log"
    with log.open("wb") as out:
        launch = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=out, stderr=out)
    try:
        url = None
        while url is None:
            assert launch.poll() is None, log.read_text()
            url = re.search(r"serving at (\S+)", log.read_text())
            time.sleep(0.1)
        body = {"model": "model", "prompt": "A dog", "max_tokens": 3, "ignore_eos": True}
        for _ in range(2 * replicas):
            reply = httpx.post(f"{url[1]}/completions", json=body, timeout=300)
            assert reply.json()["usage"]["completion_tokens"] == 3, reply.text
        metrics = httpx.get(url[1].replace("/v1", "/metrics"), timeout=60).text
        assert len(re.findall(r"^vllm:num_requests_running{", metrics, re.MULTILINE)) == replicas
        launch.send_signal(signal.SIGINT)
        launch.wait(90)
    finally:
        launch.kill()
        launch.wait()
