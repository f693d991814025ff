"""One row of logits to one token: the filters, the draw, and what happens at the edges."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import SamplingParams
from minillm.engine.sampler import CANDIDATES, distribution, pick, sample, uniform


def row_request(params: SamplingParams, seed: int = 0, num_tokens: int = 5):
    """What the sampler reads of a request."""
    return SimpleNamespace(params=params, seed=seed, num_tokens=num_tokens)


def exact(logits, temperature, top_k=0, top_p=1.0) -> np.ndarray:
    """The filtered distribution by a plain walk through all tokens, most likely first and, among equals, by rising id. [vocab]"""
    x = np.asarray(logits, dtype=np.float64)
    p = np.exp((x - x.max()) / temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda t: (-p[t], t))[: top_k or None]
    mass = math.fsum(p[t] for t in order)
    kept, so_far = [], 0.0
    for t in order:
        kept.append(t)
        so_far += p[t] / mass
        if so_far >= top_p:
            break
    out = np.zeros_like(p)
    out[kept] = p[kept]
    return out / out.sum()


def dense(vocab: int, ids, probs) -> np.ndarray:
    out = np.zeros(vocab)
    out[np.arange(vocab) if ids is None else ids.numpy()] = probs.numpy()
    return out


FILTERS = [(0, 1.0), (1, 1.0), (3, 1.0), (0, 0.5), (0, 0.9), (4, 0.7), (1, 0.8), (50, 0.999)]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k, top_p", FILTERS)
def test_the_distribution_is_temperature_then_top_k_then_top_p(temperature, top_k, top_p):
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 2
    got = dense(40, *distribution(logits, temperature, top_k, top_p))
    np.testing.assert_allclose(got, exact(logits, temperature, top_k, top_p), atol=1e-12)


def test_the_order_of_filters_is_stated_and_matters():
    """With p = .4 .3 .2 .1, top_k=2 leaves .57 and .43; top_p=.5 then keeps the first alone. The other order would keep two."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert dense(4, *distribution(logits, 1.0, 2, 0.5)).tolist() == [1, 0, 0, 0]
    assert np.count_nonzero(dense(4, *distribution(logits, 1.0, 0, 0.5))) == 2


logit_rows = st.lists(
    st.one_of(st.floats(-30, 30), st.sampled_from([0.0, 1.0, -math.inf, 1e5, -1e5])), min_size=1, max_size=12
).filter(lambda xs: any(x > -math.inf for x in xs))


@settings(max_examples=200)
@given(
    logit_rows,
    st.sampled_from([1e-8, 1e-3, 0.7, 1.0, 30.0]),
    st.integers(0, 14),
    st.floats(1e-9, 1.0),
    st.floats(0, 1, exclude_max=True),
)
def test_a_drawn_token_is_always_in_the_support(logits, temperature, top_k, top_p, u):
    row = torch.tensor(logits, dtype=torch.float64)
    ids, probs = distribution(row, temperature, top_k, top_p)
    assert bool(torch.isfinite(probs).all()) and float(probs.sum()) == pytest.approx(1)
    token = pick(ids, probs, u)
    assert logits[token] > -math.inf
    assert dense(len(logits), ids, probs)[token] > 0
    if top_k:
        assert np.count_nonzero(dense(len(logits), ids, probs)) <= top_k


@pytest.mark.parametrize("u", [0.0, 0.5, math.nextafter(1.0, 0.0)])
def test_a_token_without_probability_is_never_picked_at_the_ends_of_the_unit_interval(u):
    probs = torch.tensor([0.0, 0.0, 0.5, 0.0, 0.5, 0.0, 0.0], dtype=torch.float64)
    assert pick(None, probs, u) in (2, 4)


def test_equal_logits_are_kept_by_rising_id():
    ids, probs = distribution(torch.zeros(10), 1.0, top_k=3)
    assert ids.tolist() == [0, 1, 2] and probs.tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("shape", [(10,), (1000,), (50_000,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_greedy_takes_the_lowest_id_among_equals(shape, dtype):
    logits = torch.zeros(2, *shape, dtype=dtype)
    logits[0, [3, 7]] = 5.0
    logits[1, [8, 9]] = 5.0
    tokens = sample(logits, [row_request(SamplingParams())] * 2)
    assert [t.token_id for t in tokens] == [3, 8]


def test_top_k_1_keeps_one_token_whatever_top_p_says():
    for top_p in (0.8, 1.0, 1e-9):
        ids, probs = distribution(torch.tensor([1.0, 3.0, 2.0]), 1.0, top_k=1, top_p=top_p)
        assert ids.tolist() == [1] and probs.tolist() == [1.0]


def test_a_tiny_top_p_keeps_one_token_and_top_p_1_keeps_all():
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert distribution(logits, 1.0, top_p=1e-300)[0].tolist() == [1]
    assert np.count_nonzero(dense(3, *distribution(logits, 1.0, top_p=1.0))) == 3
    assert np.count_nonzero(dense(3, *distribution(logits, 1.0, top_k=3, top_p=1.0))) == 3


def test_temperatures_of_0_and_1e_8_choose_the_maximum_without_nan():
    logits = torch.tensor([[0.0, -math.inf, 2.0, 1.999999], [1e5, -1e5, 0.0, -math.inf]])
    for temperature in (0.0, 1e-8, 1e-320):
        for u in (0.0, 0.999999):
            ids, probs = distribution(logits[1], max(temperature, 1e-8))
            assert pick(ids, probs, u) == 0
        tokens = sample(logits, [row_request(SamplingParams(temperature=temperature), seed=s) for s in (1, 2)])
        assert [t.token_id for t in tokens] == [2, 0]


@pytest.mark.parametrize("vocab", [CANDIDATES + 1, 3 * CANDIDATES])
@pytest.mark.parametrize("shape", ["flat", "nearly flat", "steep", "few levels"])
@pytest.mark.parametrize("top_k", [0, 10, CANDIDATES, 1999])
@pytest.mark.parametrize("top_p", [0.2, 0.51, 0.95, 1.0])
def test_looking_at_the_most_likely_tokens_first_changes_nothing(vocab, shape, top_k, top_p):
    """Distributions so flat that the first candidates hold too little mass, or that ties cross their border."""
    noise = torch.randn(vocab, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = {"flat": 0 * noise, "nearly flat": 0.01 * noise, "steep": 5 * noise, "few levels": (2 * noise).round()}[shape]
    got = dense(vocab, *distribution(logits, 1.0, top_k, top_p))
    np.testing.assert_allclose(got, exact(logits, 1.0, top_k, top_p), atol=1e-12)


def chi_square_limit(degrees: int) -> float:
    """A value that chi-square exceeds with a probability of about 1e-6 (Wilson and Hilferty 1931)."""
    z = 4.75
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (5, 1.0), (0, 0.8), (6, 0.9)])
def test_drawn_tokens_follow_the_exact_distribution(temperature, top_k, top_p):
    """Both ways of getting many numbers: many seeds at one position, many positions of one seed."""
    logits = torch.randn(9, generator=torch.Generator().manual_seed(7))
    want = exact(logits, temperature, top_k, top_p)
    support = want > 0
    ids, probs = distribution(logits, temperature, top_k, top_p)
    draws = 3000
    for numbers in ([uniform(s, 5) for s in range(draws)], [uniform(11, n) for n in range(draws)]):
        counts = np.bincount([pick(ids, probs, u) for u in numbers], minlength=9)
        assert counts[~support].sum() == 0
        if support.sum() > 1:
            chi = float(((counts - draws * want)[support] ** 2 / (draws * want[support])).sum())
            assert chi < chi_square_limit(int(support.sum()) - 1)


def test_random_numbers_of_neighbouring_seeds_and_positions_are_unrelated():
    """Correlation of numbers one seed or one position apart, over 4000 pairs, within five standard errors."""
    n = 4000
    for a, b in (
        ([uniform(s, 3) for s in range(n)], [uniform(s + 1, 3) for s in range(n)]),
        ([uniform(5, p) for p in range(n)], [uniform(5, p + 1) for p in range(n)]),
    ):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(n)


def test_the_largest_seed_gives_a_number():
    assert 0 <= uniform(2**63 - 1, 0) < 1


all_params = st.builds(
    SamplingParams, temperature=st.sampled_from([0.0, 1e-8, 0.8, 1.5]), top_k=st.integers(0, 5),
    top_p=st.sampled_from([1e-9, 0.5, 0.9, 1.0]), logprobs=st.sampled_from([None, 0, 3]),
)  # fmt: skip


@settings(max_examples=60)
@given(st.data(), st.integers(2, 7))
def test_rows_never_influence_each_other(data, rows):
    """Each row of a batch, shuffled, gives what it gives alone, whatever the others ask for."""
    logits = torch.randn(rows, 12, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    logits[data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, 11))] = -math.inf
    requests = [row_request(data.draw(all_params), seed, seed + 2) for seed in range(rows)]
    order = data.draw(st.permutations(range(rows)))
    together = sample(logits[order], [requests[i] for i in order])
    for at, i in enumerate(order):
        assert sample(logits[i : i + 1], [requests[i]]) == [together[at]]


def test_logprobs_are_the_models_own_with_the_chosen_token_first():
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(1))
    want = torch.log_softmax(logits[0].double(), dim=-1)
    for n in (0, 1, 3, 12, 100):
        # a hot temperature: reported values must not follow it
        (drawn,) = sample(logits, [row_request(SamplingParams(temperature=5.0, top_p=0.99, logprobs=n), seed=4)])
        assert next(iter(drawn.logprobs)) == drawn.token_id
        assert set(drawn.logprobs) == {drawn.token_id, *want.topk(min(n, 12)).indices.tolist()}
        assert all(value == pytest.approx(float(want[t]), abs=1e-12) for t, value in drawn.logprobs.items())
    assert sum(math.exp(v) for v in drawn.logprobs.values()) == pytest.approx(1), "all tokens together have probability one"
    others = list(drawn.logprobs.values())[1:]
    assert others == sorted(others, reverse=True)


def test_logprobs_of_a_row_with_minus_infinity_are_not_nan():
    logits = torch.tensor([[0.0, -math.inf, 1.0]])
    (drawn,) = sample(logits, [row_request(SamplingParams(logprobs=3))])
    assert drawn.logprobs[1] == -math.inf and not any(math.isnan(v) for v in drawn.logprobs.values())
