from __future__ import annotations

import pytest

from minillm.course.predictions import calibration, parse_number, predict, reveal, short, verdict
from minillm.course.progress import Progress


def ask(store, id="0.1 ridge", **options):
    return predict(id, "Where is the ridge?", "FLOP/B", reference=20, progress=store, **options)


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (0, "0"),
        (40, "40"),
        (1234.5, "1,230"),
        (0.01234, "0.0123"),
        (999.6, "1,000"),
        (12_345_678, "12,300,000"),
        (1.5e12, "1.5e+12"),
        (1e-7, "1e-07"),
        (-3.14159, "-3.14"),
        (0.1, "0.1"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_are_written_for_people(x, text):
    assert short(x) == text


@pytest.mark.parametrize(
    ("text", "x"), [("1500", 1500), (" 1,500 ", 1500), ("1 500", 1500), ("1_500", 1500), ("1.5e3", 1500), (".5", 0.5), ("-2", -2)]
)
def test_typed_numbers_are_read(text, x):
    assert parse_number(text) == x


@pytest.mark.parametrize("text", ["", "many", "1,5", "nan", "inf", "1..2"])
def test_other_text_is_refused_by_name(text):
    with pytest.raises(ValueError, match="number"):
        parse_number(text)


@pytest.mark.parametrize(
    ("predicted", "measured", "log", "says"),
    [
        (40, 20, True, "2 times too high"),
        (20, 50, True, "2.5 times too low"),
        (100, 105, True, "Within 10 %"),
        (5, 5, True, "Exactly right"),
        (7, 5, False, "2 ms too high"),
        (0, 5, True, "5 ms too low"),
        (1, 1000, True, "1,000 times too low"),
    ],
)
def test_the_distance_is_put_in_words(predicted, measured, log, says):
    assert says in verdict(predicted, measured, "ms", log)


def test_without_a_front_end_the_reference_stands_in_and_nothing_is_stored(store):
    p = ask(store)
    assert p.value == 20 and "reference guess is 20 FLOP/B" in repr(p)
    assert set(p._repr_mimebundle_()) == {"text/plain"}
    assert "The reference guess was 20 FLOP/B; measured: 10 FLOP/B. That is 2 times too high." in repr(reveal(p, 10))
    assert calibration(store) == []


def test_a_committed_number_is_revealed_in_a_later_session(store, front_end):
    ask(store).commit(40)
    ask(store).commit(50)  # before the reveal the mind may change
    shown = reveal("0.1 ridge", 25, progress=Progress(store.folder))
    assert shown.factor == 2 and "You predicted 50 FLOP/B; measured: 25 FLOP/B. That is 2 times too high." in repr(shown)
    assert "time" in store.read()["predictions"]["0.1 ridge"]


def test_a_second_prediction_after_the_reveal_is_refused(store, front_end):
    p = ask(store)
    p.commit(40)
    reveal(p, 25)
    with pytest.raises(ValueError, match="you predicted 40 FLOP/B, and that stands"):
        p.commit(25)
    assert p.value == 40


def test_a_first_prediction_after_the_reveal_is_marked_and_does_not_count(store, front_end):
    p = ask(store)
    assert p.value is None
    assert "No prediction was committed; measured: 25 FLOP/B." in repr(reveal(p, 25))
    p.commit(25)
    assert p.record["late"] and "does not count" in repr(reveal(p, 25))
    assert calibration(store) == []


def test_measuring_again_updates_the_factor_and_keeps_the_prediction(store, front_end):
    p = ask(store)
    p.commit(40)
    reveal(p, 25)
    assert reveal(p, 20).factor == 2 and p.value == 40


def test_calibration_is_the_median_factor_of_each_chapter(store, front_end):
    for id, guess, measured in (("0.1 a", 10, 20), ("0.2 b", 40, 10), ("0.2 c", 9, 9), ("10.1 d", 3, 1), ("2.1 e", 1, 1)):
        ask(store, id).commit(guess)
        reveal(id, measured, progress=store)
    ask(store, "3.1 open").commit(1)
    predict("4.1 linear", "?", "s", log=False, reference=2, low=0, high=9, progress=store).commit(1)
    reveal("4.1 linear", 5, progress=store)
    chapters = calibration(store)
    assert [(c.chapter, c.count, c.median_factor, c.within_two) for c in chapters] == [
        ("0", 3, 2, 2),
        ("2", 1, 1, 1),
        ("10", 1, 3, 0),
    ]


def test_bad_questions_are_refused():
    for options in ({"low": 0}, {"low": 30}, {"high": 10}, {"low": 5, "high": 5}):
        with pytest.raises(ValueError, match="low <= reference <= high"):
            ask(None, **options)
    with pytest.raises(ValueError, match="like '0.1 ridge'"):
        predict("ridge", "?", "", reference=1)
    with pytest.raises(ValueError, match="finite"):
        reveal("0.1 x", float("nan"))


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_impossible_predictions_are_refused(store, front_end, value):
    with pytest.raises(ValueError, match="must be a positive number"):
        ask(store).commit(value)
    assert store.read()["predictions"] == {}


def widgets_of(box):
    question, row, said = box.children
    slider, field, unit, button = row.children
    return slider, field, button, said


def test_the_widget_commits_what_is_slid_or_typed(store, front_end):
    from minillm.course.ask import ask as show

    p = ask(store)
    slider, field, button, said = widgets_of(show(p))
    assert field.value == ""  # the slider's start must not suggest an answer
    slider.value = 100
    assert field.value == "100"
    button.click()
    assert p.value == 100 and "Committed: <b>100 FLOP/B</b>" in said.value
    field.value = "1.5e3"
    button.click()
    assert p.value == 1500
    field.value = "<b>lots"
    button.click()
    assert p.value == 1500 and "&lt;b&gt;lots" in said.value


def test_the_widget_is_closed_to_changes_once_revealed(store, front_end):
    from minillm.course.ask import ask as show

    p = ask(store)
    p.commit(40)
    reveal(p, 25)
    slider, field, button, said = widgets_of(show(p))
    assert slider.disabled and field.disabled and button.disabled and "It is revealed and stands." in said.value


def test_running_the_cell_again_leaves_no_widget_behind(store, front_end):
    from ipywidgets.widgets.widget import _instances

    p = ask(store)
    p._repr_mimebundle_()
    count = len(_instances)
    for _ in range(5):
        ask(store)._repr_mimebundle_()
    assert len(_instances) == count
