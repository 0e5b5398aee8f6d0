"""Contrast, sizes of controls and sizes of text, computed in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine
from playwright.sync_api import Page

from tests.e2e.test_playground_markdown import DOCUMENT
from tests.playground import ask, failures, import_answer, needs_chromium, until

pytestmark = [pytest.mark.nightly, needs_chromium]

# A canvas converts every color of CSS to red, green, blue and alpha.
CONTRASTS = """(() => {
  const context = Object.assign(document.createElement('canvas'), {width: 1, height: 1})
    .getContext('2d', {willReadFrequently: true});
  const paint = (colors) => {
    context.clearRect(0, 0, 1, 1);
    for (const color of colors) { context.fillStyle = color; context.fillRect(0, 0, 1, 1); }
    return [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  };
  const light = (rgb) => {
    const part = rgb.map((one) => one / 255)
      .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
  };
  const contrast = (one, other) => {
    const [high, low] = [light(one), light(other)].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
  };
  const found = [];
  const measure = (node, color, text) => {
    const below = [];
    for (let one = node; one; one = one.parentElement) {
      const style = getComputedStyle(one);
      if (one.matches(':disabled') || style.visibility === 'hidden') return;
      below.unshift(style.backgroundColor);
    }
    const ratio = contrast(paint([...below, color]), paint(below));
    found.push([ratio, text.trim().slice(0, 30), node.tagName + '.' + node.className]);
  };
  const seen = (node) => node.getClientRects().length && !node.closest('.sr, .skip, [hidden]');
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const node = text.parentElement;
    if (!text.data.trim() || !seen(node) || node.closest('script, style, option')) continue;
    let opacity = 1;
    for (let one = node; one; one = one.parentElement) opacity *= getComputedStyle(one).opacity;
    if (opacity < 1 && !node.closest(':disabled')) found.push([0, text.data, 'opacity']);
    measure(node, getComputedStyle(node).color, text.data);
  }
  for (const input of document.querySelectorAll('input, textarea, select')) {
    if (!seen(input)) continue;
    measure(input, getComputedStyle(input).color, input.value || '');
    if (input.placeholder) {
      measure(input, getComputedStyle(input, '::placeholder').color, input.placeholder);
    }
  }
  return found;
})()"""
SIZES = """(() => [...document.querySelectorAll(
    'button, select, summary, input:not([type=file]), textarea, label.check')]
  .filter((one) => one.getClientRects().length && !one.closest('[hidden], .check input')
    && getComputedStyle(one).visibility === 'visible' && !one.matches('.check input'))
  .map((one) => { const box = one.getBoundingClientRect(); return [box.width, box.height,
    parseFloat(getComputedStyle(one).fontSize), one.tagName,
    one.id || one.ariaLabel || one.textContent.slice(0, 30)]; }))()"""
OPEN_GROUPS = "document.querySelectorAll('.group').forEach((one) => { one.open = true; })"


@pytest.fixture(scope="module")
def root() -> Any:
    with background(ScriptedEngine(lambda prompt, choice: "An answer of `words`.")) as url:
        yield url.removesuffix("v1")


def prepare(tab: Page, folder: Path) -> None:
    """Show every kind of text: Markdown, probabilities, an error, a banner and a notice."""
    ask(tab, "hello")
    import_answer(tab, folder, DOCUMENT, error={"message": "An error", "code": "code"})
    until(tab, "document.querySelector('table')")
    tab.evaluate(OPEN_GROUPS)
    tab.evaluate("document.querySelector('#banner').hidden = false")
    tab.evaluate("document.querySelector('#set-tools').value = '{'")
    tab.evaluate("document.querySelector('#set-tools').dispatchEvent(new Event('input'))")
    tab.evaluate("document.querySelector('#compare').click()")
    tab.evaluate("document.documentElement.style.setProperty('--none', 0)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_a_contrast_of_4_5(open_tab, root: str, scheme: str, tmp_path: Path) -> None:
    tab = open_tab(root)
    tab.emulate_media(color_scheme=scheme)
    until(tab, f"document.documentElement.dataset.theme === '{scheme}'")
    prepare(tab, tmp_path)
    # The end of the animation of a new turn.
    tab.evaluate("Promise.all(document.getAnimations().map((one) => one.finished))")
    measured = tab.evaluate(CONTRASTS)
    tab.evaluate("document.querySelectorAll('#conversations .open')[1].click()")
    until(tab, "document.querySelectorAll('.turn').length === 2")
    tab.click("#heat")
    until(tab, "document.querySelector('.tok')")
    tab.evaluate(
        "document.querySelectorAll('.tok').forEach((one, place, all) => "
        "one.style.setProperty('--l', place / all.length))"
    )
    tab.click(".tok")
    until(tab, "!document.querySelector('#popover').hidden")
    tab.evaluate("Promise.all(document.getAnimations().map((one) => one.finished))")
    measured += tab.evaluate(CONTRASTS)
    assert len(measured) > 150
    assert not [one for one in measured if one[0] < 4.5]


def test_controls_on_phones_have_44_pixels_and_inputs_16(
    open_tab, root: str, tmp_path: Path
) -> None:
    tab = open_tab(root, width=360, height=640)
    prepare(tab, tmp_path)
    measured = tab.evaluate(SIZES)
    for name in ("history", "engine", "settings"):
        tab.click(f"#open-{name}")
        until(tab, f"getComputedStyle(document.querySelector('#{name}')).visibility === 'visible'")
        measured += tab.evaluate(SIZES)
        tab.evaluate(f"document.querySelector('#{name} .close').click()")
        until(tab, f"getComputedStyle(document.querySelector('#{name}')).visibility === 'hidden'")
    tab.evaluate("document.querySelector('#key').click()")
    measured += tab.evaluate(SIZES)
    assert len(measured) > 60
    assert not [one for one in measured if min(one[:2]) < 43.99]
    kinds = ("INPUT", "TEXTAREA", "SELECT")
    assert not [one for one in measured if one[3] in kinds and one[2] < 16]
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_columns_can_be_hidden_and_stay_hidden(open_tab, root: str) -> None:
    tab = open_tab(root)
    until(tab, "document.querySelector('#model').value")
    width = "document.querySelector('main').getBoundingClientRect().width"
    before = tab.evaluate(width)
    tab.click("#open-settings")
    assert tab.evaluate(width) > before + 250
    assert tab.evaluate("document.querySelector('#open-settings').ariaExpanded") == "false"
    tab.click("#open-engine")
    tab.click("#open-history")
    assert tab.evaluate(width) == 1280
    tab.reload()
    until(tab, "document.querySelector('#model')?.value")
    assert tab.evaluate(width) == 1280
    for name in ("settings", "engine", "history"):
        tab.click(f"#open-{name}")
    assert tab.evaluate(width) == before
    assert failures(tab) == []
