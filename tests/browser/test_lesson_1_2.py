"""Lesson 1.2 in a real JupyterLab: the recorded tree steps on and back, and the panel measures where its slider stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest

CHAPTER = Path(__file__).parents[2] / "chapters" / "1_skip" / "2_prefix_cache.ipynb"
MEASURED_MS = 150_000  # the whole lesson runs first


def picture_bytes(image: Any) -> list[int]:
    """The picture that is shown; its address is a new one each time."""
    loaded = "image => new Promise(done => image.complete ? done() : image.addEventListener('load', done))"
    image.evaluate(loaded)
    read = "async image => Array.from(new Uint8Array(await (await fetch(image.src)).arrayBuffer()))"
    found: list[int] = image.evaluate(read)
    return found


@pytest.mark.model
def test_the_tree_steps_on_and_back_and_the_panel_follows_its_slider(open_notebook: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    book = open_notebook("2_prefix_cache.ipynb", CHAPTER)
    book.run_all()
    page = book.page
    panel = book.cell("lab.hit_panel(bench")
    said, image = panel.locator(".verdict"), panel.locator(".widget-image").first
    expect(said).to_contain_text("256 of 512 tokens cached", timeout=MEASURED_MS)
    expect(said).to_contain_text("times as long", timeout=MEASURED_MS)
    before, picture = said.text_content(), image.get_attribute("src")
    book.press(panel, "ArrowRight")
    expect(said).to_contain_text("384 of 512 tokens cached", timeout=MEASURED_MS)
    expect(said).to_contain_text("times as long", timeout=MEASURED_MS)
    assert said.text_content() != before and image.get_attribute("src") != picture, "neither picture nor verdict followed the key"
    book.screenshot("lesson_1_2_panel")

    stepper = book.cell("Stepper(")
    frame, drawn = stepper.locator(".frame"), stepper.locator(".widget-image").first
    frame.scroll_into_view_if_needed()
    expect(frame).to_contain_text("1 of 13: an empty pool")
    empty = picture_bytes(drawn)
    forward, back = (stepper.locator("button", has=page.locator(f".fa-step-{way}")).last for way in ("forward", "backward"))
    forward.click()
    expect(frame).to_contain_text("2 of 13: A runs: 0 of 14 tokens found")
    first = picture_bytes(drawn)
    assert first != empty
    forward.click()
    forward.click()
    expect(frame).to_contain_text("4 of 13: B runs: 12 of 14 tokens found")
    book.screenshot("lesson_1_2_tree")
    back.click()
    back.click()
    expect(frame).to_contain_text("2 of 13: A runs")
    assert picture_bytes(drawn) == first, "going back shows the frame that was there"
    assert not book.errors
