"""The accept rule keeps the target's distribution, whatever is drafted, and its very tokens where a draft is certain."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm import SamplingParams
from minillm.engine.request import Request
from minillm.engine.sampler import sample, uniform
from minillm.spec.draft import Draft
from minillm.spec.verify import accept_or_replace, dense_distribution, verify

DRAWS = 4000


def request(seed=0, num_tokens=3, **params):
    return Request("r", 1, [1] * num_tokens, SamplingParams(**params), seed, frozenset(), 64)


def logits_of(*distributions):
    return torch.tensor(distributions, dtype=torch.float64).log()


def chi_square(counts, expected):
    """The statistic over tokens that can occur; a token that cannot must not have occurred."""
    assert all(c == 0 for c, e in zip(counts, expected, strict=True) if e == 0)
    return sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True) if e > 0)


def limit(degrees):
    """Above this a chi-square of so many degrees of freedom is found once in about 100,000 draws (Wilson and Hilferty 1931)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.27 * math.sqrt(2 / (9 * degrees))) ** 3


def drawn_from(q, seed, position):
    """A drafted token: its randomness is the proposer's own."""
    return int(torch.searchsorted(torch.tensor(q).cumsum(0), uniform(seed, position, 7), right=True).clamp(max=len(q) - 1))


def numbers(seed):
    """u and w: what a rule decides with."""
    return uniform(seed, 3, 1), uniform(seed, 3, 2)


PAIRS = [
    ((0.5, 0.3, 0.2), (0.5, 0.3, 0.2)),
    ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5)),
    ((0.25, 0.25, 0.25, 0.25), (0.25, 0.25, 0.25, 0.25)),
    ((0.7, 0.3, 0.0), (0.0, 0.3, 0.7)),  # the draft has mass where the target has none, and none where it has most
    ((1.0, 0.0, 0.0), (0.1, 0.6, 0.3)),
    ((0.4, 0.4, 0.2), (0.0, 0.0, 1.0)),
    ((0.9, 0.1), (0.1, 0.9)),
]


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_first_and_second_token_have_the_targets_distribution_under_a_drawn_draft(p, q):
    """The second row is another distribution, so that a token taken from the wrong row shows."""
    second = tuple(reversed(p))
    logits, probs = logits_of(p, second, second), torch.tensor([q, q], dtype=torch.float64)
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(DRAWS):
        r = request(seed, temperature=1.0)
        draft = Draft((drawn_from(q, seed, 3), drawn_from(q, seed, 4)), probs)
        tokens = [s.token_id for s in verify(logits, r, draft)]
        if len(tokens) == 1:  # the next pass gives the second token: the model's own, from the same row
            tokens += [s.token_id for s in sample(logits[1:2], [request(seed, 4, temperature=1.0)])]
        counts[tuple(tokens[:2])] = counts.get(tuple(tokens[:2]), 0) + 1
    pairs = list(itertools.product(range(len(p)), repeat=2))
    expected = [DRAWS * p[a] * second[b] for a, b in pairs]
    free = sum(e > 0 for e in expected) - 1
    assert chi_square([counts.get(pair, 0) for pair in pairs], expected) < limit(max(free, 1))


FILTERS = [{"top_k": 2}, {"top_p": 0.6}, {"temperature": 0.5}, {"top_k": 3, "top_p": 0.7, "temperature": 1.7}]


@pytest.mark.parametrize("filters", FILTERS)
def test_the_distribution_is_the_one_that_the_parameters_make(filters):
    params = {"temperature": 1.0} | filters
    row, q = torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0], dtype=torch.float64), (0.1, 0.2, 0.3, 0.2, 0.2)
    p = dense_distribution(row, request(**params))
    counts = [0] * 5
    for seed in range(DRAWS):
        draft = Draft((drawn_from(q, seed, 3),), torch.tensor([q], dtype=torch.float64))
        counts[verify(torch.stack([row, row]), request(seed, **params), draft)[0].token_id] += 1
    assert chi_square(counts, [DRAWS * float(x) for x in p]) < limit(max(int((p > 0).sum()) - 1, 1))


logit_rows = st.lists(st.sampled_from([-1e5, -3.0, 0.0, 1.0, 1.0, 2.5]), min_size=4, max_size=4)


@given(
    rows=st.lists(logit_rows, min_size=1, max_size=5), tokens=st.lists(st.integers(0, 3), min_size=4, max_size=4),
    temperature=st.sampled_from([0.0, 1e-8, 0.7, 1.0]), top_k=st.integers(0, 4), top_p=st.sampled_from([0.01, 0.5, 1.0]),
    seed=st.integers(0, 2**40),
)  # fmt: skip
def test_a_certain_draft_gives_exactly_the_tokens_of_decoding_without_drafts(rows, tokens, temperature, top_k, top_p, seed):
    logits = torch.tensor(rows, dtype=torch.float64)
    draft = Draft(tuple(tokens[: len(rows) - 1]))
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    got = [s.token_id for s in verify(logits, request(seed, **params), draft)]
    alone = [sample(logits[i : i + 1], [request(seed, 3 + i, **params)])[0].token_id for i in range(len(rows))]
    assert got == alone[: len(got)]
    agreed = next((i for i, (a, d) in enumerate(zip(alone, draft.token_ids)) if a != d), len(draft))
    assert len(got) == agreed + 1


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_no_draft_is_plain_sampling(temperature):
    logits = logits_of((0.2, 0.5, 0.3))
    r = request(5, temperature=temperature)
    assert verify(logits, r, Draft()) == sample(logits, [r])


def test_the_first_drafted_token_is_verified_too():
    """Prompt [1, 1, 1], and a lookup that proposes more of it: the model says 2."""
    logits = logits_of((0.1, 0.1, 0.8), (0.8, 0.1, 0.1), (0.1, 0.8, 0.1))
    assert [s.token_id for s in verify(logits, request(), Draft((1, 1)))] == [2]


def test_a_full_acceptance_gives_one_token_more_than_was_drafted():
    logits = logits_of((0.1, 0.8, 0.1), (0.1, 0.1, 0.8), (0.8, 0.1, 0.1))
    assert [s.token_id for s in verify(logits, request(), Draft((1, 2)))] == [1, 2, 0]


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ((0.0, 1.0), (1.0, 0.0)),
        ((0.5, 0.5), (0.5, 0.5)),
        ((1.0, 0.0), (1.0, 0.0)),
        ((0.0, 0.0, 1.0), (0.5, 0.5, 0.0)),
        ((0.3, 0.7), (0.7 - 1e-16, 0.3 + 1e-16)),
    ],
)
def test_the_token_is_always_one_that_the_target_can_say(p, q):
    p, q = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
    for seed in range(300):
        for drafted in range(len(q)):
            token, accepted = accept_or_replace(p, q, drafted, *numbers(seed))
            assert p[token] > 0 and (token == drafted or not accepted)


def test_equal_distributions_accept_everything():
    p = torch.tensor([0.2, 0.8], dtype=torch.float64)
    assert all(accept_or_replace(p, p, t, *numbers(seed)) == (t, True) for t in (0, 1) for seed in range(200))


def test_logprobs_are_those_of_each_tokens_own_row():
    logits = logits_of((0.1, 0.8, 0.1), (0.1, 0.1, 0.8))
    first, second = verify(logits, request(logprobs=1), Draft((1,)))
    assert first.logprobs == pytest.approx({1: math.log(0.8)}) and second.logprobs == pytest.approx({2: math.log(0.8)})


def test_logits_that_do_not_fit_the_draft_are_refused():
    with pytest.raises(ValueError, match="a draft of 2 tokens is verified by 3 rows of logits, got 2"):
        verify(logits_of((0.5, 0.5), (0.5, 0.5)), request(), Draft((0, 1)))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"gives \(token id, whether the drafted token stands\), got None"), (1, "got 1"),
        ((1.5, False), "got"), ((), "got"),
        ((2, False), "chose token 2, which the target cannot say"), ((9, False), "token 9"), ((-1, False), "token -1"),
        ((0, True), "accepts token 0 where token 1 was drafted"),
    ],
    ids=str,
)  # fmt: skip
def test_a_rule_of_somebodys_own_is_held_to_its_promise(answer, message):
    logits, q = logits_of((0.5, 0.5, 0.0), (0.5, 0.5, 0.0)), torch.tensor([[0.2, 0.8, 0.0]])
    with pytest.raises(ValueError, match=message):
        verify(logits, request(temperature=1.0), Draft((1,), q), rule=lambda p, q, token, u, w: answer)
