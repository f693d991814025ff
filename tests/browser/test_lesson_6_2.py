"""Lesson 6.2 in a real JupyterLab: all cells run, and the panel measures another drafter where it is chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest

CHAPTER = Path(__file__).parents[2] / "chapters" / "6_break_serial" / "2_drafts.ipynb"
MEASURED_MS = 150_000  # the whole lesson runs first


@pytest.mark.model
def test_the_panel_measures_the_drafter_that_is_chosen(open_notebook: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    book = open_notebook("2_drafts.ipynb", CHAPTER)
    book.run_all()
    panel = book.cell("lab.draft_panel(race")
    said = panel.locator(".verdict")
    expect(said).to_contain_text("trained head, chat, γ = 2", timeout=MEASURED_MS)
    expect(said).to_contain_text("times the speed", timeout=MEASURED_MS)
    panel.locator("select").first.select_option(label="prompt lookup")
    expect(said).to_contain_text("prompt lookup, chat", timeout=MEASURED_MS)
    expect(said).not_to_contain_text("measuring", timeout=MEASURED_MS)
    book.screenshot("lesson_6_2")
    assert not book.errors
