"""Lesson 3.1 in a real JupyterLab: all cells run, and the panel's slider moves counts and measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest

CHAPTER = Path(__file__).parents[2] / "chapters" / "3_move_less" / "1_flash_attention.ipynb"
MEASURED_MS = 150_000  # the whole lesson runs first


@pytest.mark.model
def test_the_panel_of_the_lesson_follows_its_sliders(open_notebook: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    book = open_notebook("1_flash_attention.ipynb", CHAPTER)
    book.run_all()
    panel = book.cell("lab.attention_panel(machine")
    said, image = panel.locator(".verdict"), panel.locator(".widget-image").first
    expect(said).to_contain_text("n = 512, head_dim 64", timeout=MEASURED_MS)
    expect(said).to_contain_text("times as long", timeout=MEASURED_MS)
    before, picture = said.text_content(), image.get_attribute("src")
    book.press(panel, "ArrowLeft")
    expect(said).to_contain_text("n = 256, head_dim 64", timeout=MEASURED_MS)
    expect(said).to_contain_text("times as long", timeout=MEASURED_MS)
    assert said.text_content() != before and image.get_attribute("src") != picture, "neither picture nor verdict followed the key"
    image.scroll_into_view_if_needed()
    book.screenshot("lesson_3_1")
    assert not book.errors
