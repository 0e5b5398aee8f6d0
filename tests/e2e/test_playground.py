"""The page at `/` in a browser: streaming, stopping, branches and statistics."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import httpx
import pytest
from ed_esurge.frontends.playground import page, policy
from ed_esurge.frontends.playground.assembly import assemble_page
from ed_esurge.server.launch import background
from ed_esurge.testing import TOOL_TEMPLATE, NamedReplies, ScriptedEngine, byte_tokenizer

from tests.playground import ask, button, failures, needs_chromium, said, until


def test_page_contains_no_data_of_the_server() -> None:
    engine = ScriptedEngine()
    engine.model_name = "a-secret-model"
    with background(engine, api_key="a-secret-key") as url:
        root = url.removesuffix("/v1")
        answer = httpx.get(root)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/html")
        assert answer.headers["content-security-policy"] == policy()
        assert "secret" not in answer.text
        assert answer.text == page()
        assert "{{" not in answer.text
        # The page loads no other resource: its addresses are names of XML namespaces.
        addresses = set(re.findall(r"https?://\w[\w./]*", answer.text))
        names = ("2000/svg", "1998/Math/MathML")
        assert addresses == {f"http://www.w3.org/{name}" for name in names}
        markup = answer.text.partition("<script")[0].replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in markup and "https:" not in markup and "src=" not in answer.text
        assert httpx.head(root).status_code == 200
        assert httpx.get(f"{url}/models").status_code == 401


def test_modules_import_only_exported_names_and_never_each_other(tmp_path: Path) -> None:
    (tmp_path / "main.js").write_text('import { a } from "./other.js";\nexport const b = a + 1;\n')
    (tmp_path / "other.js").write_text("export const a = 1;\n")
    script = assemble_page("{{main.js}}", tmp_path)
    assert script.index("const a = 1") < script.index("const b = a + 1")
    assert "export" not in script and "import" not in script
    (tmp_path / "other.js").write_text("const a = 1;\n")
    with pytest.raises(ValueError, match="does not export"):
        assemble_page("{{main.js}}", tmp_path)
    (tmp_path / "other.js").write_text('import { b } from "./main.js";\nexport const a = b;\n')
    with pytest.raises(ValueError, match="import each other"):
        assemble_page("{{main.js}}", tmp_path)
    (tmp_path / "main.js").write_text("export default 1;\n")
    with pytest.raises(ValueError, match="must import names"):
        assemble_page("{{main.js}}", tmp_path)


@needs_chromium
def test_chat_can_be_streamed_and_stopped(open_tab) -> None:
    engine = ScriptedEngine(
        lambda prompt, choice: "**word** " * 60, max_model_len=8192, delay=0.004
    )
    with background(engine) as url:
        tab = open_tab(url.removesuffix("v1"))
        ask(tab, "hello", wait=False)
        until(tab, "document.querySelectorAll('.turn.assistant strong').length > 2")
        # The animation does not restart with each frame.
        assert not tab.evaluate("document.querySelector('.turn.assistant').matches('.fresh')")
        assert tab.evaluate("document.querySelector('#send').ariaLabel") == "Stop"
        assert tab.evaluate("document.querySelector('#log').getAttribute('aria-busy')") == "true"
        tab.keyboard.press("Escape")
        until(tab, "document.querySelector('#send').ariaLabel === 'Send'")
        until(tab, "document.querySelector('#spoken').textContent === 'Stopped'")
        stopped = said(tab)
        assert 0 < len(stopped) < 60 * 5
        (request,) = engine.requests
        end = time.monotonic() + 60
        while engine.aborted != [request]:
            assert time.monotonic() < end
            time.sleep(0.01)
        button(tab, "Continue")
        until(
            tab,
            "document.querySelector('.turn.assistant .branch')?.innerText.includes('2 / 2')",
            seconds=90,
        )
        assert said(tab).startswith(stopped.partition("*")[0].rstrip())
        assert failures(tab) == []


@pytest.mark.nightly
@needs_chromium
def test_answers_and_edited_questions_create_branches(open_tab) -> None:
    engine = ScriptedEngine(lambda prompt, choice: f"{len(engine.requests)}.{choice}")
    with background(engine) as url:
        tab = open_tab(url.removesuffix("v1"))
        ask(tab, "first")
        assert said(tab) == "1.0"
        button(tab, "Regenerate")
        until(tab, "document.querySelector('.turn.assistant .said').innerText === '2.0'")
        button(tab, "Previous version")
        until(tab, "document.querySelector('.turn.assistant .said').innerText === '1.0'")
        tab.click('.turn.user [aria-label="Edit"]')
        until(tab, "document.activeElement.matches('.edit textarea')")
        tab.evaluate("document.querySelector('.edit textarea').value = 'other'")
        tab.click(".edit .solid")
        until(tab, "document.querySelector('.turn.assistant .said')?.innerText === '3.0'")
        assert tab.evaluate("document.querySelector('.turn.user .said').innerText") == "other"
        assert "2 / 2" in tab.evaluate("document.querySelector('.turn.user .branch').innerText")
        # Several answers of one request are branches as well.
        tab.evaluate("document.querySelector('#set-n').value = 3")
        tab.evaluate("document.querySelector('#set-n').dispatchEvent(new Event('input'))")
        ask(tab, "many")
        assert "1 / 3" in tab.evaluate(
            "document.querySelector('.turn:last-of-type .branch').innerText"
        )
        assert [params.n for params in engine.requests.values()] == [1, 1, 1, 3]
        # The conversation persists after a reload; a new conversation is empty.
        tab.reload()
        until(tab, "document.querySelectorAll('.turn').length === 4")
        tab.click("#new")
        until(tab, "document.querySelector('.starters')")
        assert failures(tab) == []


@needs_chromium
@pytest.mark.nightly
def test_selecting_an_alternative_token_creates_a_branch(open_tab) -> None:
    engine = ScriptedEngine(lambda prompt, choice: "Grüße an alle")
    prompts: list[str] = []
    generate = engine.generate

    def noted(prompt_token_ids, sampling_params, request_id, **options):
        prompts.append(engine.tokenizer.decode(prompt_token_ids.token_ids))
        return generate(prompt_token_ids, sampling_params, request_id, **options)

    engine.generate = noted
    with background(engine) as url:
        tab = open_tab(url.removesuffix("v1"))
        ask(tab, "greet")
        assert said(tab) == "Grüße an alle"
        tab.click("#heat")
        until(tab, "document.querySelectorAll('.tok').length > 10")
        assert (
            tab.evaluate("document.querySelector('.tok').getAttribute('aria-label')") == "G, 50.0 %"
        )
        # A letter of two bytes is shown at its second token.
        assert tab.evaluate(
            "[...document.querySelectorAll('.tok')].map(t => t.innerText).join('')"
        ) == ("Gr…ü…ße an alle</s>")
        assert "perplexity 2.00" in tab.evaluate("document.querySelector('.legend').innerText")
        tab.evaluate("document.querySelector('.tok').focus()")
        tab.keyboard.press("ArrowRight")
        until(tab, "document.querySelectorAll('.tok')[1].getAttribute('aria-expanded') === 'true'")
        rows = tab.evaluate(
            "[...document.querySelectorAll('.popover button')].map(b => b.innerText)"
        )
        assert len(rows) == 5 and rows[0].split() == ["r", "50.0", "%"]
        tab.keyboard.press("Escape")
        until(tab, "document.querySelector('#popover').hidden")
        tab.click(".tok:nth-child(2)")
        tab.keyboard.press("Enter")
        until(tab, "document.activeElement.matches('.popover button')")
        other = tab.evaluate("document.activeElement.querySelector('code').textContent")
        tab.keyboard.press("Enter")
        until(tab, "document.querySelectorAll('.turn.assistant .branch').length")
        until(tab, "document.querySelector('.turn.assistant .figures')")
        assert prompts[-1].endswith(f"G{other}")
        text = tab.evaluate("[...document.querySelectorAll('.tok')].map(t => t.innerText).join('')")
        assert text.startswith(f"G{other}Gr")
        assert failures(tab) == []


@pytest.mark.nightly
@needs_chromium
def test_panel_shows_engine_statistics(open_tab) -> None:
    engine = ScriptedEngine(lambda prompt, choice: "x" * 4000, max_model_len=8192, delay=0.005)
    numbers = {"kv_cache_usage": 0.25, "prefix_cache_queries": 200, "prefix_cache_hits": 50}
    stats = engine.stats
    engine.stats = lambda: {**stats(), **numbers}
    with background(engine) as url:
        tab = open_tab(url.removesuffix("v1"))
        ask(tab, "hello", wait=False)

        def value(tile: str) -> str:
            return f"document.querySelector('#tile-{tile} .value').innerText"

        until(tab, f"parseFloat({value('speed')}) > 1")
        until(tab, f"{value('running')} === '1'")
        assert tab.evaluate(value("cache")) == "25%"
        assert tab.evaluate(value("prefix")) == "25%"
        assert (
            tab.evaluate("document.querySelector('#tile-speed path').getAttribute('d').length") > 10
        )
        assert tab.evaluate("document.querySelector('#state').innerText") == "ready"
        tab.keyboard.press("Escape")
        until(tab, f"{value('running')} === '0'")
        engine.is_healthy = False
        until(tab, "document.querySelector('#state').innerText === 'not answering'")


@pytest.mark.nightly
@needs_chromium
def test_page_requests_and_sends_the_api_key(open_tab) -> None:
    with background(ScriptedEngine(lambda prompt, choice: "inside"), api_key="right") as url:
        tab = open_tab(url.removesuffix("v1"))
        until(tab, "document.querySelector('#key-dialog').open")
        assert tab.evaluate("document.querySelector('#model').value") == ""
        for key in ("wrong", "right"):
            tab.evaluate("document.querySelector('#key-value').value = ''")
            tab.evaluate("document.querySelector('#key-value').focus()")
            tab.keyboard.insert_text(key)
            tab.keyboard.press("Enter")
            if key == "wrong":
                until(tab, "document.querySelector('#key-error').textContent.includes('API key')")
        ask(tab, "hello")
        assert said(tab) == "inside"
        assert tab.evaluate("localStorage.getItem('esurge.key')") is None


@pytest.mark.nightly
@needs_chromium
def test_page_supports_tool_calls_and_results(open_tab) -> None:
    engine = NamedReplies(tokenizer=byte_tokenizer(TOOL_TEMPLATE))
    with background(engine) as url:
        tab = open_tab(url.removesuffix("v1"))
        tab.evaluate("document.querySelectorAll('.group').forEach((one) => { one.open = true; })")
        tab.evaluate("document.querySelector('#set-tools').focus()")
        tab.keyboard.insert_text("{")
        until(tab, "document.querySelector('#tools-wrong').textContent.includes('not JSON')")
        tab.click("#group-tools button.text")
        until(tab, "document.querySelector('#set-tools').value.includes('weather')")
        ask(tab, "reply only")
        until(tab, "document.querySelector('.call b').innerText === 'weather'")
        assert "Zürich" in tab.evaluate("document.querySelector('.call pre').innerText")
        tab.evaluate("document.querySelector('.call textarea').focus()")
        tab.keyboard.insert_text("21 degrees")
        tab.click(".call .solid")
        until(tab, "document.querySelectorAll('.turn.tool').length === 1")
        until(tab, "document.querySelector('.turn.assistant:last-of-type .figures')")
        assert "21 degrees" in engine.prompts[-1]
        assert '"role": "tool"' in engine.prompts[-1]


@pytest.mark.nightly
@needs_chromium
def test_playground_sends_schema_with_request(open_tab) -> None:
    engine = ScriptedEngine(lambda prompt, choice: '{"rivers": []}')
    with background(engine) as url:
        tab = open_tab(url.removesuffix("v1"))
        tab.evaluate("document.querySelector('#group-form').open = true")
        tab.click("#group-form button.text")
        ask(tab, "rivers")
        (params,) = engine.requests.values()
        wanted = params.structured_outputs
        assert wanted is not None and wanted.json_schema is not None
        assert "rivers" in json.loads(wanted.json_schema)["properties"]


@pytest.mark.nightly
@needs_chromium
def test_page_continues_texts_without_a_chat_template(open_tab) -> None:
    engine = ScriptedEngine(lambda prompt, choice: " upon", tokenizer=byte_tokenizer(None))
    with background(engine) as url:
        tab = open_tab(url.removesuffix("v1"))
        until(tab, "document.querySelector('#mode-hint').innerText.includes('continues')")
        ask(tab, "Once")
        assert said(tab) == " upon"
        tab.click("#heat")
        until(tab, "document.querySelector('.tok')?.getAttribute('aria-label') === '␣, 50.0 %'")


@needs_chromium
@pytest.mark.nightly
def test_playground_fits_phone_width_and_labels_controls(open_tab) -> None:
    with background(ScriptedEngine(lambda prompt, choice: "word " * 30)) as url:
        tab = open_tab(url.removesuffix("v1"), width=360, height=640)
        ask(tab, "a question that is long enough to need two lines on a telephone")
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        for name in ("engine", "settings"):
            tab.click(f"#open-{name}")
            until(tab, f"document.activeElement.closest('#{name}')")
            assert tab.evaluate(f"document.querySelector('#open-{name}').ariaExpanded") == "true"
            tab.keyboard.press("Escape")
            until(tab, f"document.activeElement.id === 'open-{name}'")
        tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        tab.click("#open-settings")
        tree = tab.context.new_cdp_session(tab).send("Accessibility.getFullAXTree")["nodes"]
        roles = {"button", "textbox", "combobox", "slider", "spinbutton", "checkbox", "link"}
        parts = [node for node in tree if node.get("role", {}).get("value") in roles]
        assert len(parts) > 40
        mute = [node for node in parts if not node.get("name", {}).get("value", "").strip()]
        assert not mute
        for scheme in ("dark", "light"):
            tab.emulate_media(color_scheme=scheme)
            until(tab, f"document.documentElement.dataset.theme === '{scheme}'")
        tab.keyboard.press("Escape")
        until(tab, "getComputedStyle(document.querySelector('#settings')).visibility === 'hidden'")
        tab.click("#theme")
        tab.click("#theme")
        assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
        assert failures(tab) == []
