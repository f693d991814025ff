"""3.2 break: find the fault in a checkpoint reader, the sign of a packed word."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minillm.course.expect import expect_equal, expect_shape, unchanged
from minillm.course.task import NamedCheck, Task
from minillm.quant.words import unpack_words

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble that holds each of eight channels."""


def _words(codes: list[list[int]]) -> Tensor:
    """Codes [rows, out] as int32 words, by Python's integers."""
    rows = []
    for row in codes:
        words = [sum(row[n + c] << 4 * PLACES[c] for c in range(8)) for n in range(0, len(row), 8)]
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def _checkpoint(in_features: int, out_features: int, group: int, most: int = 15) -> tuple[tuple[Tensor, ...], Tensor]:
    """(qweight, qzeros, scales) with codes up to ``most``, and the weight [out, in] that they stand for."""
    codes = torch.randint(0, most + 1, (in_features, out_features))
    zeros = torch.randint(0, most + 1, (in_features // group, out_features))
    scales = torch.rand(in_features // group, out_features) * 0.1 + 0.01
    weight = (codes - zeros.repeat_interleave(group, 0)) * scales.repeat_interleave(group, 0)
    return (_words(codes.tolist()), _words(zeros.tolist()), scales), weight.T.contiguous()


def _break_compare(f: Any, in_features: int, out_features: int, group: int, most: int, what: str) -> None:
    stored, weight = _checkpoint(in_features, out_features, group, most)
    expect_equal(f(*stored), weight, atol=1e-5, what=what)


def _break_shape(f: Any) -> None:
    stored, _ = _checkpoint(32, 24, 16, most=7)
    expect_shape(f(*stored), [24, 32], torch.float32, "32 inputs, 24 outputs")


def _break_order(f: Any) -> None:
    """Output channel n of one input has code n; zeros are 0 and scales 1."""
    qweight, qzeros = _words([list(range(8))]), _words([[0] * 8])
    expect_equal(f(qweight, qzeros, torch.ones(1, 8)), torch.arange(8.0)[:, None], what="codes 0 to 7 of eight channels")


def _break_groups(f: Any) -> None:
    _break_compare(f, 64, 16, 16, 7, "four groups with codes up to 7")


def _break_random(f: Any) -> None:
    _break_compare(f, 64, 24, 32, 15, "codes up to 15")


def _break_zero(f: Any) -> None:
    """A zero point of 0 and one of 15, in every channel."""
    for zero in (0, 15):
        qweight, qzeros = _words([[zero] * 8]), _words([[zero] * 8])
        expect_equal(f(qweight, qzeros, torch.ones(1, 8)), torch.zeros(8, 1), what=f"code and zero point {zero}")


def _break_state(f: Any) -> None:
    (qweight, qzeros, scales), _ = _checkpoint(16, 8, 16)
    with unchanged(qweight=qweight, qzeros=qzeros, scales=scales):
        f(qweight, qzeros, scales)


BREAK = Task(
    "3.2 break",
    "Find the fault in a checkpoint reader",
    (
        NamedCheck("shape", _break_shape, hint=2),
        NamedCheck("exact: which nibble is which channel", _break_order, hint=2),
        NamedCheck("random: small codes in four groups", _break_groups, hint=3),
        NamedCheck("random: all codes", _break_random, hint=1),
        NamedCheck("edges: zero points 0 and 15", _break_zero, hint=1),
        NamedCheck("state: inputs unchanged", _break_state),
    ),
    (
        "Compare got and expected where they differ: by how much, and for which channels? What is the number 0xF0000000 as an\n"
        "int32, and what comes in from the left when it is shifted to the right?",
        "qweight int32 [in, out / 8], qzeros int32 [in / group, out / 8], scales [in / group, out] → weight [out, in].\n"
        "Channel c of eight lies in nibble 0, 4, 1, 5, 2, 6, 3, 7 of its word.",
        "nibbles = (words.unsqueeze(-1) >> shifts) & 15: the mask belongs to every nibble, also to the top one.",
    ),
    references=(unpack_words,),
)
