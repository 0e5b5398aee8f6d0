"""Every query of the Grafana dashboard returns data from a Prometheus that scrapes the server.

The test requires the program `prometheus` on the PATH (Debian: `apt-get install prometheus`).
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from ed_esurge import eSurge
from ed_esurge.server.launch import background
from ed_esurge.testing import byte_tokenizer
from ed_infra.specs import LoraSpec
from ed_infra.testing import tiny_llama
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

DASHBOARD = Path(__file__).parents[2] / "docs/grafana.json"
CONFIG = """
global: {{scrape_interval: 200ms}}
scrape_configs:
  - job_name: esurge
    static_configs: [{{targets: ["{target}"]}}]
"""


def queries() -> dict[str, str]:
    """Return title and number -> query of the dashboard, without Grafana's variables."""
    found = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for number, target in enumerate(panel["targets"]):
            text = target["expr"].replace("$__rate_interval", "5s").replace("$model", ".*")
            found[f"{panel['title']} {number}"] = text
    return found


@pytest.mark.nightly
def test_every_query_of_the_dashboard_returns_data(tmp_path: Path) -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed")
    fields = tiny_llama(vocab_size=258)
    fields.pop("model_type")
    config = LlamaConfig(**fields, sharding_axis_dims=(1, 1, 1, 1, 1))
    model = LlamaForCausalLM.create(config, seed=0)
    options: dict[str, Any] = {
        "max_model_len": 128,
        "page_size": 8,
        "num_pages": 64,
        "silent_mode": True,
    }
    adapted = LlamaForCausalLM.create(config, seed=0).apply_lora(LoraSpec(rank=2), name="mine")
    adapted.save_pretrained(tmp_path / "adapters" / "mine")
    options |= {"max_loras": 1, "max_lora_rank": 2}
    engine = eSurge(model, byte_tokenizer(), compile_runner=False, **options)
    engine.load_lora_adapter("mine", tmp_path / "adapters" / "mine")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with background(engine) as url:
        target = re.sub(r"https?://|/v1", "", url)
        (tmp_path / "prometheus.yml").write_text(CONFIG.format(target=target))
        command = [
            program,
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ]
        process = subprocess.Popen(command)
        try:
            waiting = queries()
            for _ in range(60):  # load, until each query has data
                body = {"prompt": "a" * 40, "max_tokens": 8, "n": 2}
                assert httpx.post(f"{url}/completions", json=body, timeout=120).is_success
                time.sleep(0.5)
                waiting = {
                    name: query for name, query in waiting.items() if not _values(port, query)
                }
                if not waiting:
                    return
            raise AssertionError(f"queries without data: {waiting}")
        finally:
            process.terminate()
            process.wait()


def _values(port: int, query: str) -> list[object]:
    """Return the numbers of a query; [] before Prometheus is ready."""
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return []
    if answer.status_code == 503:
        return []
    found = answer.json()
    assert found["status"] == "success", (query, found)
    return [one for one in found["data"]["result"] if one["value"][1] != "NaN"]
