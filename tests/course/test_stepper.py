"""A recording can be played, stepped through in both directions, and read without a front end."""

from __future__ import annotations

import ipywidgets as w
import pytest
from ipywidgets.widgets.widget import _instances

from minillm.course import live
from minillm.course.plots import bars
from minillm.course.stepper import Stepper


@pytest.fixture(autouse=True)
def no_stepper_outlives_its_test():
    before = set(_instances)
    yield
    for widget in list(live._open.values()):
        live.close_widget(widget)
    assert set(_instances) <= before, "widgets outlived the stepper"


def stepper(frames=(3, 1, 4, 1, 5), name="toy", drawn=None, **options):
    def draw(frame, i):
        if drawn is not None:
            drawn.append(i)
        return bars({"blocks": frame}, "blocks"), f"step {i} holds <b>{frame}</b>"

    return Stepper(name, frames, draw, **options)


def test_the_buttons_step_and_stop_at_both_ends():
    s = stepper()
    s.go(0)
    seen = []
    for button in (s.back, s.forward, s.forward, s.back, *[s.forward] * 9):
        button.click()
        seen.append(s.frame)
    assert seen == [0, 1, 2, 1, 2, 3, 4, 4, 4, 4, 4, 4, 4]


def test_playing_moves_the_slider_and_the_slider_sets_where_play_goes_on():
    s = stepper()
    s.play.value = 2
    assert s.frame == 2 and "3 of 5: step 2 holds <b>4</b>" in s.verdict.value
    s.slider.value = 1
    assert s.play.value == 1 and "2 of 5" in s.verdict.value


def test_going_back_shows_the_same_picture_and_draws_it_once():
    drawn = []
    s = stepper(drawn=drawn)
    s.go(1)
    first = s.picture.value
    s.go(2)
    assert s.picture.value != first
    s.go(1)
    assert s.picture.value == first and sorted(drawn) == sorted(set(drawn))


@pytest.mark.parametrize(("still", "frame"), [(-1, 4), (0, 0), (2, 2), (-5, 0)])
def test_a_reader_without_a_front_end_sees_the_still_frame(still, frame):
    s = stepper(still=still)
    bundle = s._repr_mimebundle_()
    assert s.frame == frame and set(bundle) == {"text/plain", "image/png"}
    assert bundle["text/plain"] == "toy: 5 recorded frames; run this cell in JupyterLab to play them"


def test_a_learner_starts_at_the_first_frame(monkeypatch):
    monkeypatch.setenv("MINILLM_HEADLESS", "0")
    s = stepper()
    assert s.frame == 0 and "application/vnd.jupyter.widget-view+json" in s._repr_mimebundle_()


def test_running_the_cell_again_replaces_the_stepper():
    stepper()
    held = len(_instances)
    for _ in range(3):
        stepper()
    assert len(_instances) == held


def test_a_closed_stepper_no_longer_answers():
    s = stepper()
    s.close()
    s.close()
    s.slider.value = 0
    assert "5 of 5" in s.verdict.value and not any(isinstance(widget, w.Play) for widget in _instances.values())


def test_a_recording_that_cannot_be_shown_is_refused():
    with pytest.raises(ValueError, match="at least one frame"):
        stepper(())
    with pytest.raises(ValueError, match="still is frame 5 of 5"):
        stepper(still=5)
