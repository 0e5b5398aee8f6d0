"""The tables of endpoints and the Grafana dashboard agree with the server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import openai
from ed_esurge.server.endpoints import list_endpoints
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine

ROOT = Path(__file__).parents[2]


def rows() -> list[tuple[str, list[str], str, str]]:
    """Return the rows of the tables: table, paths, what the server does, and the client.

    A path can begin with a method: `POST /props`.
    """
    sections = []
    for page in ("vllm", "llama_cpp", "ollama"):
        text = (ROOT / f"docs/migrate/{page}.md").read_text()
        sections.append(text.split("\n## Endpoints of ")[1].split("\n## ")[0])
    section = "\n".join(sections)
    found, table = [], ""
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or cells[0].startswith("---"):
            continue
        if "`" not in cells[0]:
            table = cells[0]
            continue
        paths = re.findall(r"`((?:[A-Z]+ )?/[^`]*)`", cells[0])
        found.append((table, paths, cells[1], cells[2]))
    return found


def test_tables_of_endpoints_list_exactly_the_routes_of_the_server() -> None:
    routes = {endpoint.path for endpoint in list_endpoints()}
    listed = {path for _, paths, what, _ in rows() for path in paths if not _absent(what)}
    assert listed == routes
    routes |= {f"{endpoint.method} {endpoint.path}" for endpoint in list_endpoints()}
    for table, paths, what, _ in rows():
        if _absent(what):
            assert not routes.intersection(paths), (table, paths)
            assert ":" in what or "over HTTP" in what, f"{paths}: the reason is missing"


def _absent(what: str) -> bool:
    return what.startswith("absent")


def test_dashboard_reads_only_metrics_that_the_server_exports() -> None:
    dashboard = json.loads((ROOT / "docs/grafana.json").read_text())
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    assert len({(place["x"], place["y"]) for place in places}) == len(places)
    used = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            text = re.sub(r"\{[^}]*\}|\[[^\]]*\]|by \([^)]*\)", "", target["expr"])
            used |= set(re.findall(r"\b(?:vllm:|esurge:|http_|process_)\w+", text))
    stats = {
        **dict.fromkeys(("num_requests_running", "num_requests_waiting", "kv_cache_usage"), 0),
        **dict.fromkeys(("prefix_cache_queries", "prefix_cache_hits", "num_preemptions"), 0),
        **dict.fromkeys(("recompiles", "num_pages", "iteration_tokens_sum"), 0),
    }
    from ed_esurge.config import EngineConfig
    from ed_esurge.outputs import STEP_SIZES

    stats |= {f"iteration_tokens_{bound}": 1 for bound in (*STEP_SIZES, "inf")}
    engine = ScriptedEngine(config=EngineConfig(strict_context=True, max_loras=1))
    engine.replica_stats = lambda: [stats]  # type: ignore[method-assign]
    with background(engine) as url:
        openai.OpenAI(base_url=url, api_key="none").completions.create(model="scripted", prompt="a")
        text = httpx.get(url.replace("/v1", "/metrics")).text
    exported = {
        line.partition("{")[0].partition(" ")[0]
        for line in text.splitlines()
        if not line.startswith("#")
    }
    assert used <= exported, used - exported
    assert len(used) > 20
