"""Lesson 2.2 in a real JupyterLab: all cells run, and the panel's sliders move counts and measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest

CHAPTER = Path(__file__).parents[2] / "chapters" / "2_compute_less" / "2_sparse_attention.ipynb"
MEASURED_MS = 150_000  # the whole lesson runs first


@pytest.mark.model
def test_the_panel_of_the_lesson_follows_its_sliders(open_notebook: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    book = open_notebook("2_sparse_attention.ipynb", CHAPTER)
    book.run_all()
    panel = book.cell("lab.sparse_panel(bench")
    said, image = panel.locator(".verdict"), panel.locator(".widget-image").first
    expect(said).to_contain_text("context 8,192, 8 blocks", timeout=MEASURED_MS)
    expect(said).to_contain_text("times as fast", timeout=MEASURED_MS)
    before, picture = said.text_content(), image.get_attribute("src")
    book.press(panel, "ArrowRight")
    expect(said).to_contain_text("context 16,384, 8 blocks", timeout=MEASURED_MS)
    expect(said).to_contain_text("times as fast", timeout=MEASURED_MS)
    assert said.text_content() != before and image.get_attribute("src") != picture, "neither picture nor verdict followed the key"
    book.screenshot("lesson_2_2")
    assert not book.errors
