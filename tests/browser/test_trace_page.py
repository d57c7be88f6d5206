"""The trace page in a real browser: what it shows, its keys, its dark scheme, its manners."""

from __future__ import annotations

import io
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Browser

from ddtree_client.trace_page import TracedAnswer, render
from ddtree_client.types import Result
from tests.browser.chromium import Watched, open_browser
from tests.fakes.traced_rounds import traced_answer

Open = Callable[..., Watched]
HOSTILE = (
    "</title><script>alert(0)</script>",
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "</pre><svg onload=alert(2)>",
    '" onmouseover="alert(3)',
    "${alert(4)}",
    "\u2028alert(5)\u2029",
    "&lt;b&gt;",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens the page of an answer; when the test is over it must have kept quiet."""
    opened: list[Watched] = []
    file = tmp_path / "trace.html"

    def open_page(result: Result, prompt: str = "Why is the sky blue?", **context: Any) -> Watched:
        answer = TracedAnswer("localhost:8001", "ddtree", prompt, {"tree_budget": 12}, result)
        file.write_text(render(answer), encoding="utf-8")
        page = browser.new_page(viewport={"width": 1200, "height": 900}, **context)
        opened.append(Watched(page))
        opened[-1].open(file)
        return opened[-1]

    yield open_page
    for watched in opened:
        watched.assert_quiet(file)
        watched.page.close()


def test_it_shows_the_answer_the_tree_and_the_times(show: Open) -> None:
    result = traced_answer(6)
    page = show(result).page
    assert page.inner_text("#prompt") == "Why is the sky blue?"
    # A sign stands before a line's end; the rest is the answer as it is.
    assert str(page.text_content("#answer")).replace("↵", "") == result.text
    told = result.trace[1]
    path, nodes = told["accepted_path"], told["nodes"]
    assert page.inner_text("#round-heading") == "Round 1 of 6"
    titles = page.locator("#canvas g.accepted > title").all_text_contents()
    assert [int(re.search(r"token (\d+)", title)[1]) for title in titles] == [  # type: ignore[index]
        nodes["ids"][node - 1] for node in path
    ]
    assert page.locator("#canvas g.rejected").count() == len(nodes["ids"]) - len(path)
    assert page.locator("#canvas g.bonus").count() == page.locator("#canvas g.root").count() == 1
    # Lit and faint: an accepted edge is thicker, a rejected node lets the page shine through.
    style = "getComputedStyle(document.querySelector('#canvas {}')).{}"
    assert float(page.evaluate(style.format("g.rejected", "opacity"))) < 0.7
    accepted, rejected = (
        float(page.evaluate(style.format(f"path.{kind}", "strokeWidth")).removesuffix("px"))
        for kind in ("accepted", "rejected")
    )
    assert accepted > 2 * rejected
    assert "verify 9.00 ms" in page.inner_text("#times")
    assert str(page.locator("#canvas text.probability").first.text_content()).endswith("%")
    kinds = page.evaluate(
        "[...document.querySelectorAll('#answer .token.current')].map((one) => one.classList[1])"
    )
    assert kinds == ["accepted"] * len(path) + ["bonus"]


def test_the_accepted_path_is_one_line_from_the_root(show: Open) -> None:
    # Found by its form on the page, not by its class: every accepted box stands on the root's row.
    result = traced_answer(8, nodes=30, seed=4)
    page = show(result).page
    for told in result.trace[1:]:
        rows = page.evaluate(
            "[...document.querySelectorAll('#canvas :is(g.root, g.accepted, g.bonus) rect')]"
            ".map((box) => [box.getAttribute('x'), box.getAttribute('y')].map(Number))"
        )
        assert len(rows) == len(told["accepted_path"]) + 2
        assert len({y for _, y in rows}) == 1
        assert [x for x, _ in rows] == sorted({x for x, _ in rows})
        page.keyboard.press("ArrowRight")


def test_the_summary_adds_up(show: Open) -> None:
    result = traced_answer(20, seed=2)
    page = show(result).page
    rounds = result.trace[1:]
    first = page.locator("#by-depth tbody tr").first.locator("td").all_text_contents()
    got_there = sum(bool(each["accepted_path"]) for each in rounds)
    assert first[:3] == ["1", "20", f"{100 * got_there / 20:.0f}%"]
    counts = page.locator("#per-round tbody tr td:nth-child(2)").all_text_contents()
    assert sum(map(int, counts)) == 20
    assert page.locator("#stages tbody tr").nth(2).locator("td").all_text_contents()[:3] == [
        "verify", "180", "9.00",
    ]  # fmt: skip
    assert f"acceptance length {(len(result.token_ids) - 1) / 20:.2f}" in page.inner_text("#facts")


def test_keys_move_through_the_rounds(show: Open) -> None:
    page = show(traced_answer(9)).page

    def heading() -> str:
        return str(page.inner_text("#round-heading"))

    for key, expected in (
        ("ArrowLeft", 1), ("ArrowRight", 2), ("ArrowRight", 3), ("End", 9), ("ArrowRight", 9),
        ("ArrowLeft", 8), ("Home", 1),
    ):  # fmt: skip
        page.keyboard.press(key)
        assert heading() == f"Round {expected} of 9", key
    page.locator("#slider").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert heading() == "Round 3 of 9"
    page.locator("#answer .token[data-round='5']").first.click()
    assert heading() == "Round 5 of 9"
    assert page.url.endswith("#round-5")
    page.locator("#last").click()
    assert heading() == "Round 9 of 9"
    assert page.locator("#next").is_disabled()
    # What changed is announced, and where the keyboard is can be seen.
    assert page.get_attribute("#told", "aria-live") == "polite"
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_everything_that_can_be_operated_has_a_name(show: Open) -> None:
    page = show(traced_answer(3)).page
    nameless = page.evaluate(
        "[...document.querySelectorAll('button, input, [tabindex=\"0\"], svg[role=img], section')]"
        ".filter((one) => !one.ariaLabel && !one.getAttribute('aria-labelledby')"
        " && !/\\w/.test(one.tagName === 'BUTTON' ? one.textContent : ''))"
        ".map((one) => one.outerHTML.slice(0, 80))"
    )
    assert nameless == []
    assert page.evaluate("document.documentElement.lang") == "en"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_follows_the_systems_scheme_and_its_button(show: Open, scheme: str) -> None:
    watched = show(traced_answer(4), color_scheme=scheme)
    page = watched.page
    before = picture(page.screenshot(full_page=True))
    assert (brightness(before) > 0.8) == (scheme == "light")
    assert len(before.getcolors(1 << 24) or ()) > 200, "the picture is all but empty"
    assert page.get_attribute("#theme", "aria-pressed") == str(scheme == "dark").lower()
    assert worst_contrast(watched) >= 4.5
    page.locator("#theme").click()
    after = picture(page.screenshot(full_page=True))
    assert (brightness(after) > 0.8) == (scheme == "dark")
    assert worst_contrast(watched) >= 4.5


def picture(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content)).convert("RGB")


def brightness(image: Image.Image) -> float:
    small = image.convert("L").resize((1, 1))
    return float(small.getpixel((0, 0))) / 255  # type: ignore[arg-type]


def worst_contrast(watched: Watched) -> float:
    """Of the texts on their grounds, as WCAG 2 counts it."""
    pairs = [("ink", "page"), ("ink", "card"), ("soft", "card"), ("soft", "page"), ("ink", "accepted-fill"),
             ("ink", "bonus-fill"), ("ink", "root-fill"), ("soft", "accepted-fill")]  # fmt: skip
    style = "getComputedStyle(document.documentElement)"
    return min(
        contrast(*(watched.page.evaluate(f"{style}.getPropertyValue('--{name}').trim()") for name in pair))
        for pair in pairs
    )


def contrast(one: str, other: str) -> float:
    lights = sorted((luminance(one), luminance(other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_hostile_words_are_words(show: Open) -> None:
    result = traced_answer(5, words=HOSTILE)
    page = show(result, prompt="".join(HOSTILE)).page
    assert page.text_content("#prompt") == "".join(HOSTILE)
    assert page.text_content("#answer") == result.text
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    assert page.inner_text("#round-heading") == "Round 5 of 5"
    assert page.locator("img, [onload], [onerror], [onmouseover]").count() == 0
    assert page.locator("script").count() == 2
    assert page.title() == f"DDTree trace: {''.join(HOSTILE)[:60]}".strip()


def test_the_policy_stops_what_would_become_markup(show: Open) -> None:
    # Text never does; should it ever, the browser still runs and fetches nothing: put in by hand here.
    watched = show(traced_answer(2))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.3)
        markup = f'<img src="http://127.0.0.1:{listener.getsockname()[1]}/x" onerror="window.ran = 1">'
        watched.page.evaluate("(markup) => document.body.insertAdjacentHTML('beforeend', markup)", markup)
        with pytest.raises(TimeoutError):
            listener.accept()
    assert watched.page.evaluate("window.ran") is None
    assert any("Content Security Policy" in complaint for complaint in watched.complaints)
    watched.complaints.clear()
    del watched.requests[1:]


def test_a_thousand_rounds_of_large_trees_do_not_freeze_it(show: Open) -> None:
    page = show(traced_answer(1000, nodes=64)).page
    assert page.inner_text("#round-heading") == "Round 1 of 1000"
    loaded_ms = page.evaluate("performance.getEntriesByType('navigation')[0].domComplete")
    assert loaded_ms < 10_000
    longest_ms = page.evaluate(
        """async () => {
            let longest = 0;
            for (let step = 0; step < 60; step += 1) {
              const began = performance.now();
              document.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", cancelable: true }));
              document.body.getBoundingClientRect();
              longest = Math.max(longest, performance.now() - began);
              await new Promise((go) => setTimeout(go));
            }
            return longest;
        }"""
    )
    assert page.inner_text("#round-heading") == "Round 61 of 1000"
    assert longest_ms < 1000


def test_an_answer_without_rounds_says_so(show: Open) -> None:
    result = traced_answer(0)
    page = show(replace(result, finish_reason="stop")).page
    assert page.inner_text("#told") == "The answer ended before its first round."
    page.keyboard.press("ArrowRight")
    assert page.text_content("#answer") == result.text.replace("\n", "↵\n")


def test_a_round_without_a_tree_says_why(show: Open) -> None:
    page = show(traced_answer(3, nodes=0)).page
    assert "drafting did not pay at the moment" in page.inner_text("#told")
    assert "drafting did not pay at the moment" in page.inner_text("#drafting")
    assert page.locator("#canvas g").count() == 4  # edges, boxes, root and bonus
