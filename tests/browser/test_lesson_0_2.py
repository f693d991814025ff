"""Lesson 0.2 in a real JupyterLab: all cells run, and the panel's sliders run both phases anew."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Callable

import pytest

CHAPTER = Path(__file__).parents[2] / "chapters" / "0_bottleneck" / "2_prefill_decode.ipynb"
MEASURED_MS = 150_000  # the whole lesson runs first


@pytest.mark.model
def test_the_panel_of_the_lesson_measures_both_phases_where_the_sliders_stop(open_notebook: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    book = open_notebook("2_prefill_decode.ipynb", CHAPTER)
    book.run_all()
    panel = book.cell("phases_panel(machine, [llm.model")
    said, picture = panel.locator(".verdict"), panel.locator(".widget-image").first

    def measured(prefill: str, decode: str) -> str:
        """Wait for this position; the picture's address changes with its bytes."""
        wanted = re.compile(f"Prefill, {prefill}: .*measured.*Decode, {decode}: .*measured.*Per token", re.S)
        expect(said).to_contain_text(wanted, timeout=MEASURED_MS)
        return picture.get_attribute("src")

    pictures = [measured("512 tokens", "1 request")]
    for slider, key, prefill, decode in (
        (0, "ArrowLeft", "256 tokens", "1 request"),
        (1, "ArrowRight", "512 tokens", "2 requests"),
    ):
        book.press(panel, key, slider)
        pictures.append(measured(prefill, decode))
    assert len(set(pictures)) == 3, "the picture did not follow the keys"
    assert panel.locator(".widget-image").count() == 1, "one picture, replaced in place"
    picture.scroll_into_view_if_needed()
    book.screenshot("lesson_0_2")
    assert not book.errors
