"""The products of a mixture's experts, and where the rows of each expert lie for them.

Rows are grouped by expert, so that each expert multiplies all its rows at once and its weights are read once a step; an expert
without a row is not read at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, NamedTuple, Sequence

import torch
from torch import Tensor, nn

from minillm.perf.processor import has_matrix_units
from minillm.perf.work import Work
from minillm.quant.linear import Linear, PlainLinear, PrepackedLinear


class Padding(NamedTuple):
    """How far the rows of neighbouring experts may be padded to one length, so that one product serves them.

    free: up to this length any padding costs nothing, since reading the weights takes longer. share: from FEW rows on, a product
    may have so many rows for each that it was given; fewer must be equal. tile: beyond it, lengths are multiples of it.
    """

    free: int
    share: float
    tile: int

    def length(self, rows: int) -> int:
        return rows if rows <= self.tile else -(-rows // self.tile) * self.tile

    def dear(self, length: int, experts: int, given: int) -> bool:
        """Whether a product over so many experts costs more than it saves. given: rows that are not padding."""
        return length > self.free and length * experts > (self.share if length >= FEW else 1) * given


FEW = 16
IN_16_BITS = Padding(free=32, share=1.5, tile=16)
"""A CPU's matrix units multiply whole tiles and wait for the weights. Whole tiles also make few lengths, and oneDNN compiles a
kernel for each once."""
IN_FULL = Padding(free=0, share=1.25, tile=1)
"""In 32 and 64 bits every row costs arithmetic."""


class Run(NamedTuple):
    """Neighbouring experts that one product serves: each of them has so many rows, those of the first begin at start."""

    first: int
    experts: int
    rows: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.experts * self.rows


def runs_alone(counts: Sequence[int]) -> list[Run]:
    """A run for each expert that has rows, nothing padded. counts: rows of each expert."""
    runs, start = [], 0
    for e, n in enumerate(counts):
        if n:
            runs.append(Run(e, 1, n, start))
            start += n
    return runs


def runs_padded(counts: Sequence[int], padding: Padding) -> list[Run]:
    """Neighbours together as far as padding them is not dear. However crowded one expert is, a step has at most
    share · assignments + max(free, tile) · experts rows."""
    runs: list[Run] = []
    first = longest = given = 0  # of the run that is open; none is while nothing is given
    for e, n in enumerate((*counts, 0)):
        length = padding.length(max(longest, n))
        if given and (not n or padding.dear(length, e + 1 - first, given + n)):
            runs.append(Run(first, e - first, padding.length(longest), runs[-1].stop if runs else 0))
            given = 0
        if n:
            first, longest = (first, longest) if given else (e, 0)
            longest, given = max(longest, n), given + n
    return runs


@dataclass(frozen=True)
class Places:
    """Where the rows of a step lie: sorted by expert, within an expert by token.

    counts [experts]: rows given to each. runs: None where they are known on the device only; then nothing is padded.
    tokens [rows]: the token that each row is of; padding repeats one. slots [tokens, top_k]: the row of each pair.
    """

    counts: Tensor
    runs: Sequence[Run] | None
    tokens: Tensor
    slots: Tensor

    @classmethod
    def find(cls, experts: Tensor, counts: Tensor, runs: Sequence[Run] | None) -> "Places":
        """experts [tokens, top_k], counts [experts], and runs that serve all of them."""
        order = experts.flatten().argsort(stable=True)
        slots, size = torch.arange(len(order), device=order.device), len(order)
        if runs and runs[-1].stop > size:
            size = runs[-1].stop
            held = [0] * len(counts)
            for run in runs:
                held[run.first : run.first + run.experts] = [run.rows] * run.experts
            spare = torch.tensor(held, device=order.device) - counts
            slots += (spare.cumsum(0) - spare).repeat_interleave(counts, output_size=len(order))
        tokens = order.new_zeros(size).scatter_(0, slots, order // experts.shape[1])
        return cls(counts, runs, tokens, torch.empty_like(order).scatter_(0, order, slots).view_as(experts))

    @staticmethod
    def work(pairs: int) -> Work:
        """Counting and sorting so many pairs of a token and an expert."""
        return Work(activation_bytes=8 * 15 * pairs, launches=9)


class SegmentLinear(nn.Module):
    """One linear layer for each expert, by whichever method: a product for each expert that has rows."""

    ragged = False

    def __init__(self, linears: Sequence[Linear]):
        super().__init__()
        self.linears = nn.ModuleList(linears)
        self.out_features, self.in_features, self.dtype = linears[0].out_features, linears[0].in_features, linears[0].dtype

    def runs(self, counts: Sequence[int]) -> list[Run]:
        return runs_alone(counts)

    def forward(self, rows: Tensor, places: Places) -> Tensor:
        """rows [rows, in] where the places say → [rows, out]."""
        done = [self.linears[run.first](rows[run.start : run.stop]) for run in places.runs or ()]
        return torch.cat(done) if done else rows.new_empty(0, self.out_features)

    def dense(self) -> Iterable[Tensor]:
        """Each expert's weight [out, in]."""
        return (linear.dense()[0] for linear in self.linears)  # type: ignore[operator]

    def work(self, runs: Sequence[Run]) -> Work:
        """Only what the touched experts read; their results are copied into one tensor."""
        moved = 2 * sum(run.rows for run in runs) * self.out_features * self.dtype.itemsize
        total = Work(activation_bytes=moved, launches=int(bool(runs)))
        for run in runs:
            total += self.linears[run.first].work(run.rows)  # type: ignore[operator]
        return total


class GroupedLinear(nn.Module):
    """The experts' weights in one tensor [experts, out, in]: one product serves neighbours that have rows, or all experts.

    ragged: multiply by torch's product that knows on the device where each expert's rows end; see ``serves``.
    """

    weight: Tensor

    def __init__(self, weights: Sequence[Tensor], ragged: bool = False):
        super().__init__()
        self.register_buffer("weight", torch.stack(list(weights)), persistent=False)
        _, self.out_features, self.in_features = self.weight.shape
        self.dtype, self.ragged = self.weight.dtype, ragged

    @staticmethod
    def serves(weight: Tensor) -> bool:
        """Whether torch has a fast ragged product for such weights: bfloat16 on a GPU, rows of whole 16 bytes."""
        aligned = all(n % 8 == 0 for n in weight.shape)
        return weight.is_cuda and weight.dtype == torch.bfloat16 and aligned and hasattr(torch, "_grouped_mm")

    def runs(self, counts: Sequence[int]) -> list[Run]:
        if self.ragged:
            return runs_alone(counts)
        return runs_padded(counts, IN_16_BITS if self.dtype.itemsize == 2 else IN_FULL)

    def forward(self, rows: Tensor, places: Places) -> Tensor:
        """rows [rows, in] where the places say → [rows, out]."""
        turned = self.weight.transpose(1, 2)
        if places.runs is None:
            return torch._grouped_mm(rows, turned, offs=places.counts.cumsum(0, dtype=torch.int32))
        out = rows.new_empty(len(rows), self.out_features)
        for run in places.runs:
            given, made = rows[run.start : run.stop], out[run.start : run.stop]
            if len(given) == 1:  # in bfloat16 it takes a quarter less than a product of matrices with one row
                torch.mv(self.weight[run.first], given[0], out=made[0])
            else:
                shape = run.experts, run.rows, -1
                torch.bmm(given.view(shape), turned[run.first : run.first + run.experts], out=made.view(shape))
        return out

    @property
    def linears(self) -> list[Linear]:
        """A layer for each expert, over the same memory."""
        return [Linear(weight, None, PlainLinear()) for weight in self.weight]

    def dense(self) -> Iterable[Tensor]:
        """Each expert's weight [out, in]."""
        return iter(self.weight)

    def work(self, runs: Sequence[Run]) -> Work:
        """What the touched experts read; padded rows are multiplied like any others."""
        rows, touched = runs[-1].stop if runs else 0, sum(run.experts for run in runs)
        return Work(
            flops={str(self.dtype).removeprefix("torch."): 2 * rows * self.in_features * self.out_features},
            weight_bytes=touched * self.in_features * self.out_features * self.dtype.itemsize,
            activation_bytes=rows * (self.in_features + self.out_features) * self.dtype.itemsize,
            launches=2 if self.ragged else len(runs),
        )


ExpertLinear = SegmentLinear | GroupedLinear


def expert_linears(gate_up: Sequence[Linear], down: Sequence[Linear]) -> tuple[ExpertLinear, ExpertLinear]:
    """Both products of all experts: over one tensor each where one product of several experts is faster, else by expert.

    What oneDNN packed is faster read than a plain weight, but a single expert at a time. With matrix units that makes no
    difference that the many calls would not cost; in vector units 64 packed products of 1 to 64 rows take 0.45 to 0.69 of the
    time of one over the plain tensor (1024 x 1024 in bfloat16, two cores of an AMD EPYC).
    """
    stacked = {PlainLinear, PrepackedLinear} if has_matrix_units() else {PlainLinear}
    if not all(type(one.method) in stacked and one.bias is None for one in (*gate_up, *down)):
        return SegmentLinear(gate_up), SegmentLinear(down)
    first, second = ([one.dense()[0] for one in part] for part in (gate_up, down))
    ragged = GroupedLinear.serves(first[0]) and GroupedLinear.serves(second[0])
    return GroupedLinear(first, ragged), GroupedLinear(second, ragged)
