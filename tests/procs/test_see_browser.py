"""The pages of `fullshard see` and `fullshard plan` in a browser: the script chooses and enlarges, without an error or
a request, and what is there is inside of its place."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fullshard.plan import Strategy, find_hardware, plan_of
from fullshard.plan.facts import describe
from fullshard.plan.page import page as plan_page
from fullshard.plan.spans import steps_of
from fullshard.see import page
from fullshard.see.record import read_run
from fullshard.train import shapes
from tests.harness.records import MS, two_ranks

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)

# In front of the page: note errors. Behind it: act as a user, and write down what came of it.
_NOTE = "<script>window.wrong = []; window.onerror = text => { window.wrong.push(String(text)); };</script>"
_ACT = """
<script>
const shown = () => [...document.querySelectorAll('section.shown')].filter(s => !s.hidden)
  .map(s => [s.dataset.run, s.dataset.step, s.dataset.rank].join('.'));
const found = {first: shown(), navs: [...document.querySelectorAll('nav.choice')].map(n => n.hidden)};
const [step, rank] = document.querySelectorAll('nav.choice select');
step.value = '2'; rank.value = '1';
step.dispatchEvent(new Event('change', {bubbles: true}));
found.chosen = shown();
const svg = document.querySelector('section.shown:not([hidden]) svg.lanes'), box = svg.getBoundingClientRect();
const width = () => svg.viewBox.baseVal.width;
found.box = [box.width, box.height];
found.whole = width();
for (let i = 0; i < 5; i++) svg.dispatchEvent(new WheelEvent('wheel',
  {deltaY: -100, clientX: box.left + box.width / 2, cancelable: true}));
found.enlarged = width();
const before = svg.viewBox.baseVal.x;
svg.dispatchEvent(new MouseEvent('mousedown', {clientX: 300}));
window.dispatchEvent(new MouseEvent('mousemove', {clientX: 200}));
window.dispatchEvent(new MouseEvent('mouseup'));
window.dispatchEvent(new MouseEvent('mousemove', {clientX: 0}));
found.moved = svg.viewBox.baseVal.x - before;
svg.dispatchEvent(new MouseEvent('dblclick'));
found.again = width();
found.overflow = document.documentElement.scrollWidth > document.documentElement.clientWidth;
found.requests = performance.getEntriesByType('resource').map(entry => entry.name);
found.wrong = window.wrong;
const told = document.createElement('pre');
told.id = 'found'; told.textContent = JSON.stringify(found);
document.body.append(told);
</script>
"""


def _in_browser(folder: Path, text: str, act: str = _ACT) -> dict[str, Any]:
    file = folder / "page.html"
    file.write_text(text.replace("<title>", f"{_NOTE}<title>", 1) + act)
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,1000", "--dump-dom"]
    words += [f"--user-data-dir={folder / 'profile'}", f"file://{file}"]
    dom = subprocess.run(words, capture_output=True, text=True, timeout=90, check=True).stdout
    told = re.search(r'<pre id="found">(.*?)</pre>', dom, re.S)
    assert told is not None, dom[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(told[1]))
    return found


# What is wider than its place, and so scrolls sideways.
_MEASURE = """
<script>
const told = document.createElement('pre');
told.id = 'found';
told.textContent = JSON.stringify({
  wide: [document.documentElement, ...document.querySelectorAll('pre, table, svg')]
    .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.tagName),
  beyond: [...document.querySelectorAll('svg text')].filter(e => {
    const box = e.getBoundingClientRect(), all = e.closest('svg').getBoundingClientRect();
    return box.left < all.left - 1 || box.right > all.right + 1;
  }).map(e => e.textContent),
  small: Math.min(...[...document.querySelectorAll('pre, td, li, p')]
    .map(e => parseFloat(getComputedStyle(e).fontSize))),
  pre: document.querySelectorAll('pre').length, requests: performance.getEntriesByType('resource').length,
  wrong: window.wrong});
document.body.append(told);
</script>
"""


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="no browser: chromium is not installed (apt-get install chromium)")
def test_nothing_of_a_page_scrolls_sideways_or_leaves_its_picture(tmp_path: Path) -> None:
    model = describe(shapes.named("llama-8b", 1024), "llama-8b", compute="bfloat16")
    units = [replace(unit, name=f"model.{unit.name}", module_class="LlamaDecoderLayer") for unit in model.units[1:]]
    model = replace(model, units=(model.units[0], *units))
    strategy = Strategy(16, replicas=2, offload=True, compute="bfloat16", reduce="float32")
    plan = plan_of(model, steps_of(model), strategy, find_hardware("h100-80g"))
    first, second = two_ranks(tmp_path / "one"), two_ranks(tmp_path / "two", late=3 * MS)
    pages = [plan_page(plan), page.page([read_run(first)]), page.page([read_run(first), read_run(second)])]
    for number, text in enumerate(pages):
        found = _in_browser(tmp_path, text, _MEASURE)
        assert (found["wide"], found["beyond"], found["wrong"], found["requests"]) == ([], [], [], 0), number
        assert found["small"] >= 12
        assert found["pre"] == (1 if number == 0 else 0)


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="no browser: chromium is not installed (apt-get install chromium)")
def test_the_page_works_in_a_browser(tmp_path: Path) -> None:
    first, second = two_ranks(tmp_path / "one"), two_ranks(tmp_path / "two", late=3 * MS)
    found = _in_browser(tmp_path, page.page([read_run(first)]))
    assert (found["wrong"], found["requests"], found["overflow"]) == ([], [], False)
    assert found["first"] == ["0.4.0"] and found["chosen"] == ["0.2.1"] and found["navs"] == [False]
    assert found["box"][0] > 800 and found["box"][1] > 50
    assert found["whole"] == found["again"] == 1080
    assert found["enlarged"] == pytest.approx(1080 * 0.8**5, rel=1e-3)
    assert found["moved"] == pytest.approx(100 / found["box"][0] * found["enlarged"], rel=0.02)
    both = _in_browser(tmp_path, page.page([read_run(first), read_run(second)]))
    assert both["wrong"] == [] and both["first"] == ["0.4.0", "1.4.0"] and both["chosen"] == ["0.2.1", "1.4.0"]
