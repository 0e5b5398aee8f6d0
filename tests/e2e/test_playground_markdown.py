"""Markdown of answers in the browser. The text of a model is untrusted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine
from playwright.sync_api import Page

from tests.playground import failures, import_answer, needs_chromium, until

SAID = "document.querySelector('.turn.assistant .said')"
DOCUMENT = """# Heading

A [link](https://example.org/a_(b)?x=1), **bold with *emphasis***, `code` and ~~removed~~ text.

> A quote
> > inside of a quote

1. one
   - nested
     - deeper
2. two

| left | right |
|:-----|------:|
| `a|b` | 2 |

```python
def f(x):  # a comment
    return "text" + str(1)
```

The sum $\\sum_{i=1}^n \\frac{x_i}{n}$ costs $5 or $6.

$$
\\begin{pmatrix} a & b \\\\ c & d \\end{pmatrix} = \\sqrt[3]{x^2}
$$

- [x] done
- [ ] open
"""
HOSTILE = """<script>window.stolen = 1</script><img src=x onerror="window.stolen = 1">

[a](javascript:window.stolen=1) [b](JaVaScRiPt:window.stolen=1) [c](data:text/html,x)
[d](java&#115;cript:window.stolen=1) [e](\tjavascript:window.stolen=1) [f](//evil.example/x)
[g](vbscript:x) <javascript:window.stolen=1> ![h](https://evil.example/pixel.png)
[i](https://evil.example/"onmouseover="window.stolen=1)

| <b onclick=alert(1)>x</b> | y |
|---|---|
| <svg onload="window.stolen=1"> | z |

```html"><script>window.stolen=1</script>
</code></pre><script>window.stolen = 1</script>
```

$\\text{</mtext><script>window.stolen=1</script>}$ $\\href{javascript:window.stolen=1}{x}$
"""


@pytest.fixture
def tab(open_tab) -> Iterator[Page]:
    with background(ScriptedEngine()) as url:
        yield open_tab(url.removesuffix("v1"))


def count(tab: Page, selector: str) -> int:
    return tab.evaluate(f"{SAID}.querySelectorAll({selector!r}).length")


def texts(tab: Page, selector: str) -> list[str]:
    return tab.evaluate(f"[...{SAID}.querySelectorAll({selector!r})].map((one) => one.textContent)")


@needs_chromium
def test_text_of_a_model_creates_no_script_and_no_unsafe_link(tab: Page, tmp_path: Path) -> None:
    import_answer(tab, tmp_path, HOSTILE)
    until(tab, f"{SAID}?.querySelector('table')")
    assert count(tab, "script, img, svg, iframe, object, embed, form, input, style") == 0
    links = tab.evaluate(f"[...{SAID}.querySelectorAll('a')].map((one) => [one.href, one.rel])")
    assert links
    assert all(urlsplit(href).scheme == "https" for href, _ in links)
    assert all("noopener" in rel and "noreferrer" in rel for _, rel in links)
    attributes = tab.evaluate(
        f"[...{SAID}.querySelectorAll('*')].flatMap((one) => one.getAttributeNames())"
    )
    assert not [name for name in attributes if name.startswith("on")]
    for link in range(len(links)):
        tab.evaluate(f"{SAID}.querySelectorAll('a')[{link}].dispatchEvent(new Event('mouseover'))")
    assert tab.evaluate("window.stolen ?? null") is None
    # The source of hostile text is visible, and the page sent no request to another host.
    assert "<script>window.stolen = 1</script>" in tab.evaluate(f"{SAID}.innerText")
    assert failures(tab) == []


@pytest.mark.nightly
@needs_chromium
def test_markdown_has_the_elements_of_its_marks(tab: Page, tmp_path: Path) -> None:
    import_answer(tab, tmp_path, DOCUMENT)
    until(tab, f"{SAID}?.querySelector('table')")
    assert texts(tab, "h3") == ["Heading"]
    assert tab.evaluate(f"{SAID}.querySelector('a').href") == "https://example.org/a_(b)?x=1"
    assert texts(tab, "strong") == ["bold with emphasis"]
    assert texts(tab, "strong em") == ["emphasis"]
    assert texts(tab, "del") == ["removed"]
    assert texts(tab, "blockquote blockquote") == ["inside of a quote"]
    assert texts(tab, "ol > li > ul > li > ul > li") == ["deeper"]
    assert count(tab, "ol > li") == 2
    assert texts(tab, "td") == ["a|b", "2"]
    assert tab.evaluate(f"getComputedStyle({SAID}.querySelectorAll('td')[1]).textAlign") == "right"
    assert texts(tab, ".c-keyword") == ["def", "return"]
    assert texts(tab, ".c-comment") == ["# a comment"]
    assert texts(tab, ".c-string") == ['"text"']
    assert count(tab, "math") == 2
    assert count(tab, "math[display=block] mtable mtr") == 2
    assert count(tab, "munderover, msubsup") == 1
    assert count(tab, "mfrac") == 1 and count(tab, "mroot") == 1
    assert "costs $5 or $6." in tab.evaluate(f"{SAID}.innerText")
    assert texts(tab, ".task") == ["☑ ", "☐ "]
    # A fraction is higher than a letter: the browser draws the formula.
    height = "querySelector('mfrac').getBoundingClientRect().height"
    assert tab.evaluate(f"{SAID}.{height}") > 15
    assert failures(tab) == []


@pytest.mark.nightly
@needs_chromium
def test_unusual_text_is_drawn_within_a_second(tab: Page, tmp_path: Path) -> None:
    lines = [">" * 3000, "- " * 3000, "**a *b " * 3000, "[" * 9000, "`a``" * 3000, "$x " * 3000]
    import_answer(tab, tmp_path, "\n\n".join(lines))
    until(tab, f"{SAID}?.innerText.length > 9000")
    begin = "const begin = performance.now(); document.querySelector('#heat').click();"
    time = tab.evaluate(f"(() => {{ {begin} return performance.now() - begin; }})()")
    assert time < 1000
