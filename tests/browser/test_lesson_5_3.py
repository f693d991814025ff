"""Lesson 5.3 in a real JupyterLab: all cells run, the slider re-measures, and the lanes are stepped through."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest

CHAPTER = Path(__file__).parents[2] / "chapters" / "5_saturate" / "3_graphs_and_overlap.ipynb"
MEASURED_MS = 150_000  # the whole lesson runs first


@pytest.mark.model
def test_the_panel_measures_the_padded_step_and_the_lanes_go_on(open_notebook: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    book = open_notebook("3_graphs_and_overlap.ipynb", CHAPTER)
    book.run_all()
    panel = book.cell("lab.padding_panel(")
    said, image = panel.locator(".verdict, .widget-html").last, panel.locator(".widget-image").first
    expect(panel).to_contain_text("9 rows are computed as 16", timeout=MEASURED_MS)
    expect(panel).to_contain_text("times as long", timeout=MEASURED_MS)
    before, picture = said.text_content(), image.get_attribute("src")
    book.press(panel, "ArrowRight")
    expect(panel).to_contain_text("12 rows are computed as 16", timeout=MEASURED_MS)
    expect(panel).not_to_contain_text("measuring", timeout=MEASURED_MS)
    assert said.text_content() != before and image.get_attribute("src") != picture, "neither picture nor verdict followed the key"
    lanes = book.cell("lanes.timeline_stepper(")
    expect(lanes.locator(".frame")).to_contain_text("1 of 6", timeout=MEASURED_MS)
    lanes.locator("button[title='one frame on'], button:has(.fa-step-forward)").first.click()
    expect(lanes.locator(".frame")).to_contain_text("2 of 6", timeout=MEASURED_MS)
    assert not book.errors
