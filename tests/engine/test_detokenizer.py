"""Text as it grows: half characters, stop strings across tokens, and where ids and text are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import SamplingParams
from minillm.engine.detokenizer import Detokenizer

from ..reference import ending
from ..strategies import PIECES, FakeTokenizer

TOKENIZER = FakeTokenizer()


def ids_of(*pieces: str | bytes) -> list[int]:
    return [PIECES.index(p.encode() if isinstance(p, str) else p) for p in pieces]


def stream(ids, stop=(), tokenizer=TOKENIZER):
    """Feed ids one by one; the deltas after each, the last one after finish, and the detokenizer."""
    text = Detokenizer(tokenizer, stop)
    deltas = []
    for token in ids:
        text.feed(token)
        if text.stopped:
            break
        deltas.append(text.take_delta())
    text.finish()
    return [*deltas, text.take_delta()], text


def test_a_stop_string_across_tokens_is_never_shown_in_part():
    deltas, text = stream(ids_of("xa", "b", "c"), stop=["ab"])
    assert deltas == ["x", ""] and text.text == "x" and text.stopped
    assert text.token_ids == tuple(ids_of("xa")), "the token that begins in front of the cut stays"


def test_what_was_held_back_is_shown_when_the_text_ends_without_the_stop_string():
    deltas, text = stream(ids_of("xa"), stop=["ab"])
    assert deltas == ["x", "a"] and text.text == "xa" and not text.stopped


def test_held_back_text_is_shown_as_soon_as_it_cannot_become_the_stop_string():
    deltas, _ = stream(ids_of("a", "b", "a", "c"), stop=["aba!", "abc"])
    assert deltas == ["", "", "", "abac", ""]


def test_a_beginning_of_the_stop_string_inside_another_is_kept():
    """ "aab" ends with the stop string "ab" although "aa" did not go on as it began."""
    deltas, text = stream(ids_of("a", "a", "b"), stop=["ab"])
    assert deltas == ["", "a", ""] and text.text == "a" and text.stopped
    assert text.token_ids == tuple(ids_of("a"))


def test_the_earliest_of_several_stop_strings_cuts():
    _, text = stream(ids_of("x", "abc"), stop=["c", "bc", "zzz"])
    assert text.text == "xa"


@pytest.mark.parametrize("char", ["é", "€", "😀"])
def test_bytes_of_a_character_wait_for_the_last_one(char):
    pieces = {"é": [b"\xc3", b"\xa9"], "€": [b"\xe2", b"\x82", b"\xac"], "😀": [b"\xf0\x9f", b"\x98", b"\x80"]}[char]
    deltas, text = stream(ids_of("a", *pieces, "b"))
    assert deltas == ["a", *[""] * (len(pieces) - 1), char, "b", ""] and text.text == f"a{char}b"


def test_half_a_character_at_the_end_is_shown_as_the_replacement_character():
    deltas, text = stream(ids_of("a", b"\xe2", b"\x82"))
    assert deltas == ["a", "", "", "\ufffd"] and text.text == "a\ufffd"
    assert text.token_ids == tuple(ids_of("a", b"\xe2", b"\x82"))


def test_bytes_that_never_become_a_character_do_not_hold_back_what_follows():
    deltas, _ = stream(ids_of(b"\xe2", "x", "b"))
    assert "".join(deltas) == "\ufffdxb" and deltas[:2] == ["", "\ufffdx"]


def test_a_token_that_ends_one_character_and_begins_another_shows_the_first():
    """ "€b" comes out of two tokens, "a" with the first byte and the rest with "b": only "a" has to wait."""
    deltas, _ = stream(ids_of(b"a\xe2", b"\x82\xacb"))
    assert deltas == ["", "a€b", ""]


def test_without_a_tokenizer_there_are_ids_and_no_text():
    deltas, text = stream([5, 7], tokenizer=None)
    assert deltas == ["", "", ""] and text.token_ids == (5, 7) and text.text == ""


token_lists = st.lists(st.integers(2, len(PIECES) - 1), max_size=14)
stop_lists = st.lists(st.sampled_from(["ab", "a", "ba", "abc", "€", "é ", "xab", "bab", "b €", "zz"]), max_size=3)


@settings(max_examples=400)
@given(token_lists, stop_lists)
def test_deltas_add_up_to_the_text_and_both_are_cut_where_the_rules_say(ids, stop):
    deltas, text = stream(ids, stop)
    want = ending(ids, SamplingParams(max_tokens=max(len(ids), 1), stop=stop), decode=TOKENIZER.decode)
    assert "".join(deltas) == text.text == want.text
    assert text.token_ids == want.token_ids
    assert text.stopped == (want.finish_reason == "stop")


@settings(max_examples=200)
@given(token_lists, stop_lists)
def test_shown_text_is_never_taken_back(ids, stop):
    text = Detokenizer(TOKENIZER, stop)
    shown = ""
    for token in ids:
        text.feed(token)
        assert text.text.startswith(shown)
        shown = text.text
        if text.stopped:
            break
    text.finish()
    assert text.text.startswith(shown)


class StrippingTokenizer:
    """Like SentencePiece: a word's token carries a space in front, and decoding drops the first one."""

    words = ("_the", "_cat", "s", "_sat", "_")

    def decode(self, ids):
        text = "".join(self.words[i] for i in ids).replace("_", " ")
        return text.removeprefix(" ")


@given(st.lists(st.integers(0, 4), max_size=8))
def test_a_tokenizer_that_drops_the_first_space_gives_the_same_text_in_pieces(ids):
    deltas, text = stream(ids, tokenizer=StrippingTokenizer())
    assert "".join(deltas) == text.text == StrippingTokenizer().decode(ids)
