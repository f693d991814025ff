"""The speculation study: what it measures, on a tiny model; and what its bars make of the numbers."""

from __future__ import annotations

import pytest

from minillm.bench.studies import speculation
from minillm.spec.texts import COPYING, PROMPTS

from ..strategies import tiny_llm

TEXTS = {text: [2 + i % 5, 3, 4, 2 + i % 5] for i, text in enumerate(t for texts in PROMPTS.values() for t in texts)}


class Chatty:
    """A tiny engine that can be talked to: every text is a few tokens."""

    def __init__(self, **options):
        self.llm, self.asked = tiny_llm(max_num_seqs=4, num_blocks=80, **options), []

    def chat(self, conversations, params):
        self.asked.append([c[-1]["content"] for c in conversations])
        return self.llm.generate([TEXTS[text] for text in self.asked[-1]], params)


@pytest.fixture(scope="module")
def state():
    engines = {
        "plain": Chatty(), "ngram": Chatty(**speculation.LOOKUP), "layers": Chatty(speculative="draft", draft_model=[0]),
    }  # fmt: skip
    return speculation.State(engines, tokens=12, many=4)


def test_every_bar_is_fed_with_the_same_tokens_on_both_sides(state):
    found = speculation.measure(state, 0)
    assert all(bar.value(found) > 0 for bar in speculation.BARS)
    assert all(found[f"{kind}/ngram per pass"] >= 1 for kind in PROMPTS)
    assert all(found[f"{kind}/ngram same"] == found[f"{kind}/plain same"] for kind in PROMPTS), "float64 decides alike"
    assert found["edit code/plain per pass"] == 1


def test_copying_prompts_are_all_asked_in_a_round_and_the_others_by_turns(state):
    for turn in (0, 1):
        state.engines["plain"].asked.clear()
        speculation.measure(state, turn)
        single = [texts[0] for texts in state.engines["plain"].asked if len(texts) == 1]
        assert single == [t for kind, texts in PROMPTS.items() for t in (texts if kind in COPYING else texts[turn : turn + 1])]


def test_answers_agree_up_to_their_first_difference(state):
    a, b = state.engines["plain"].llm.generate([[2, 3], [4, 5]])
    assert speculation.agreed(a, a) == len(a.token_ids)
    assert speculation.agreed(a, b) == next(i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids)) if x != y)


def test_the_bars_ask_for_what_was_promised():
    limits = {bar.name: bar.at_least for bar in speculation.BARS if bar.at_least is not None}
    assert list(limits.values()) == [2.0, 3.0, 3.0, 0.97, 0.97, 0.97] and not any(bar.at_most for bar in speculation.BARS)
