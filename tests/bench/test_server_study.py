"""The study of the server on a tiny model: it measures the same answers both ways, and its bars are the stated ratios."""

from __future__ import annotations

import pytest

from minillm.bench import stream_client
from minillm.bench.studies import server as study

from ..server.conftest import tiny


def test_a_round_measures_the_same_texts_both_ways() -> None:
    state = study.make_state(tiny(), clients=3, prompt=4, tokens=6)
    try:
        for turn in (0, 1):
            found = study.measure(state, turn)
            assert found["equal_texts"] == 1 and found["tokens"] == 18 and found["direct_s"] > 0 and found["served_s"] > 0
            assert 0 < found["served_first_s"] <= found["served_s"] and 0 < found["direct_first_s"] <= found["direct_s"]
        assert not state.llm.engine.has_work
    finally:
        state.clients.kill()
        state.clients.communicate()


def test_the_bar_is_the_ratio_of_the_rates() -> None:
    found = {"tokens": 100, "direct_s": 9.0, "served_s": 10.0, "direct_first_s": 1.0, "served_first_s": 2.0, "client_cpu_s": 0.5}
    found["equal_texts"] = 0.75
    assert [bar.value(found) for bar in study.BARS] == [0.9, 10.0, 2.0, 0.05, 0.75]
    assert study.BARS[0].judge([found])["met"] is False and study.BARS[0].at_least == 0.92


def test_events_are_read_across_the_borders_of_chunks() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = [b'data: {"a": 1}\n\ndata: {"b"', b": 2}\n\n", b"data: [DONE]\n\n"]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in [*body, b""])
    assert stream_client.events(head + chunks) == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize("answer, words", [
    (b"HTTP/1.1 429 Too Many Requests\r\n\r\n{}", "429"),
    (b'HTTP/1.1 200 OK\r\n\r\n10\r\ndata: {"a": 1}\n\n\r\n0\r\n\r\n', "broke off"),
])  # fmt: skip
def test_an_answer_that_is_no_whole_stream_is_an_error(answer: bytes, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        stream_client.events(answer)
