"""A long prompt meets decoding requests on a tiny model, with a clock that counts tokens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from minillm import LLM
from minillm.bench.interference import meet
from minillm.bench.studies import chunking as study

from ..strategies import assert_empty, greedy, tiny_llm

RUNNING, LATE = [[3, 5], [7, 2, 9], [4]], [6] * 20


class TokenClock:
    """A clock on which a step takes one second and one more for each of its tokens."""

    def __init__(self, llm: LLM):
        self.llm, self.seconds = llm, 0.0

    def __call__(self) -> float:
        counted = self.llm.meter.snapshot()
        return float(counted.steps + counted.tokens_computed)


def met(**options: Any) -> Any:
    llm = tiny_llm(**{"max_num_seqs": 4, "num_blocks": 64, **options})
    found = meet(llm, RUNNING, LATE, clock=TokenClock(llm))
    assert_empty(llm)
    return found


def test_prefill_first_makes_everybody_wait_for_the_whole_prompt_once() -> None:
    found = met(prefill="first")
    # the prompt's step takes 1 + 20 seconds, the step after it 1 + 3
    assert found.ttft == 21 and found.steps == (21, 4) and found.gaps == (25, 25, 25) and set(found.before) == {4}
    assert found.itl(99) == 25 and found.needles.steps == 1


def test_chunks_cut_the_wait_into_pieces_and_lengthen_the_way_to_the_first_token() -> None:
    found = met(prefill="chunked", max_num_batched_tokens=8)
    # steps of 3 decodes and 5 tokens of the prompt: four of them
    assert found.steps == (9, 9, 9, 9) and found.ttft == 36 and found.gaps == (9,) * 12 and found.needles.steps == 4


@pytest.mark.parametrize("budget", [4, 5, 8, 23, 64])
def test_nobodys_tokens_depend_on_the_chunk(budget: int) -> None:
    found = met(prefill="chunked", max_num_batched_tokens=budget)
    for prompt, tokens in zip([*RUNNING, LATE], found.tokens):
        assert tokens == greedy(prompt, len(tokens)) and tokens


def test_a_meeting_needs_an_idle_engine_and_room_for_all() -> None:
    with pytest.raises(ValueError, match="max_num_seqs above 3"):
        meet(tiny_llm(max_num_seqs=3), RUNNING, LATE)
    with pytest.raises(ValueError, match="ahead must be at least 2"):
        meet(tiny_llm(), RUNNING, LATE, ahead=1)
    llm = tiny_llm()
    llm.engine.add_request([3, 4])
    with pytest.raises(ValueError, match="idle"):
        meet(llm, RUNNING, LATE)


def test_a_meeting_that_is_called_off_leaves_nothing() -> None:
    for after in (0, 3, 7):
        llm, calls = tiny_llm(max_num_batched_tokens=5), itertools.count()

        def check() -> None:
            if next(calls) >= after:  # noqa: B023
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            meet(llm, RUNNING, LATE, check=check)
        assert_empty(llm)


def test_the_study_compares_two_engines_over_one_model() -> None:
    state = study.make_state(tiny_llm(), running=3, short=4, long=20, chunk=5)
    assert [e.engine.options.prefill for e in state.engines.values()] == ["first", "chunked"]
    for turn in (0, 1):
        found = study.measure(state, turn)
        assert found["chunked_steps"] == 4 and found["first_steps"] == 1 and all(v > 0 for v in found.values())
    example = {"chunked_itl": 1.0, "first_itl": 4.0, "chunked_ttft": 3.0, "first_ttft": 2.0, "chunked_steps": 4}
    assert [bar.value(example) for bar in study.BARS[:2]] == [0.25, 1.5]
    assert [bar.at_most for bar in study.BARS[:2]] == [0.35, 1.5]
