"""Wrong answers to exercise 3.2, each with the check that must catch it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minillm.quant.grid import quantise
from minillm.quant.group_linear import GroupLinear
from minillm.quant.words import unpack_words


class Right:
    """What the core's answers below are variations of."""

    def __init__(self, group=32):
        self.group = group

    def range(self, groups):
        return groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)

    def step(self, low, high):
        scale = (high - low) / 15
        return torch.where(scale > 0, scale, 1.0)

    def check(self, weight):
        if weight.shape[1] % self.group:
            raise ValueError(f"{weight.shape[1]} inputs are not a multiple of the group {self.group}")

    def halves(self, codes):
        return codes[:, ::2] | codes[:, 1::2] << 4

    def pack(self, weight, bias):
        self.check(weight)
        groups = weight.float().unflatten(1, (-1, self.group))
        low, high = self.range(groups)
        scale = self.step(low, high)
        zero = (-low / scale).round().clamp(0, 15)
        codes = (groups / scale + zero).round().clamp(0, 15).nan_to_num(0).to(torch.uint8).flatten(1)
        return {
            "codes": self.halves(codes), "scale": scale.squeeze(-1), "zero": zero.squeeze(-1).nan_to_num(0).to(torch.uint8),
            "like": weight.new_empty(0), "bias": bias,
        }  # fmt: skip

    def pairs(self, packed):
        return torch.stack([packed["codes"] & 15, packed["codes"] >> 4], dim=-1)

    def unpack(self, packed):
        codes = self.pairs(packed).flatten(1).unflatten(1, (packed["scale"].shape[1], -1)).float()
        weight = (codes - packed["zero"].unsqueeze(-1)) * packed["scale"].unsqueeze(-1)
        return weight.flatten(1).to(packed["like"].dtype)

    def apply(self, packed, x):
        return F.linear(x, self.unpack(packed).to(x.dtype), packed["bias"])


class Transposed(Right):
    def unpack(self, packed):
        return super().unpack(packed).T

    def apply(self, packed, x):
        return F.linear(x, super().unpack(packed), packed["bias"])


class FourteenSteps(Right):
    """Symmetric, as if there were no zero point."""

    def range(self, groups):
        reach = groups.abs().amax(-1, keepdim=True)
        return -reach, reach


class RangeWithoutZero(Right):
    def range(self, groups):
        return groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)


class DividesByNothing(Right):
    """The zero point of a group of zeros is 0 / 0."""

    def pack(self, weight, bias):
        low, high = self.range(weight.float().unflatten(1, (-1, self.group)) if weight.shape[1] % self.group == 0 else weight)
        return super().pack(weight, bias) | {"zero": (-low / ((high - low) / 15)).round().squeeze(-1)}


class SmallestScale(Right):
    """Keeps the scale away from 0, and rounds small weights to nothing."""

    def step(self, low, high):
        return ((high - low) / 15).clamp(min=1e-2)


class CutsDown(Right):
    """Truncates where it should round."""

    def pack(self, weight, bias):
        packed = super().pack(weight, bias)
        groups = weight.float().unflatten(1, (-1, self.group))
        codes = (groups / packed["scale"].unsqueeze(-1) + packed["zero"].unsqueeze(-1)).floor().clamp(0, 15)
        return packed | {"codes": self.halves(codes.to(torch.uint8).flatten(1))}


class SignedHalves(Right):
    """int8 bytes: the high half comes back with its sign."""

    def pairs(self, packed):
        return super().pairs({"codes": packed["codes"]}).where(
            torch.tensor([True, False]), (packed["codes"].view(torch.int8) >> 4).unsqueeze(-1).float()
        )


class OneScalePerRow(Right):
    def range(self, groups):
        low, high = super().range(groups)
        return low.amin(1, keepdim=True).expand_as(low), high.amax(1, keepdim=True).expand_as(high)


class ForgetsTheBias(Right):
    def apply(self, packed, x):
        return F.linear(x, self.unpack(packed).to(x.dtype))


class CutsTheRest(Right):
    def check(self, weight):
        pass

    def pack(self, weight, bias):
        return super().pack(weight[:, : weight.shape[1] // self.group * self.group], bias)


class KeepsTheScaleOnSelf(Right):
    def pack(self, weight, bias):
        packed = super().pack(weight, bias)
        self.scale = packed["scale"]
        return packed

    def unpack(self, packed):
        return super().unpack(packed | {"scale": self.scale})


class KeepsTheDtypeOnSelf(Right):
    def pack(self, weight, bias):
        self.like = weight.new_empty(0)
        return super().pack(weight, bias)

    def unpack(self, packed):
        return super().unpack(packed | {"like": self.like})


class SinglePrecision(Right):
    """Multiplies in float32 whatever it is given, and leaves it at that."""

    def apply(self, packed, x):
        bias = packed["bias"]
        return F.linear(x.float(), self.unpack(packed).float(), None if bias is None else bias.float())


class KeepsTheWeight(Right):
    def pack(self, weight, bias):
        return super().pack(weight, bias) | {"kept": weight.clone()}


class ByteEach(Right):
    def halves(self, codes):
        return codes

    def pairs(self, packed):
        return packed["codes"]


class Borrows(GroupLinear):
    def __init__(self, group=32):
        super().__init__(4, group, False)


SHAPE = "shape: what pack, unpack and apply give"
CORE = (
    (Transposed, SHAPE), (CutsDown, "random: at most half a step off"), (FourteenSteps, "exact: numbers that are on a grid"),
    (RangeWithoutZero, "edges: groups on one side of 0"), (DividesByNothing, "edges: constant groups"),
    (SmallestScale, "random: at most half a step off"),
    (SignedHalves, "exact: numbers that are on a grid"), (OneScalePerRow, "random: at most half a step off"),
    (ForgetsTheBias, "random: apply multiplies by what unpack gives"),
    (CutsTheRest, "edges: inputs that are no multiple of the group"),
    (KeepsTheScaleOnSelf, "state: inputs unchanged, layers apart"),
    (KeepsTheDtypeOnSelf, "state: inputs unchanged, layers apart"), (SinglePrecision, SHAPE),
    (KeepsTheWeight, "budget: bytes held"), (ByteEach, "budget: bytes held"), (Borrows, SHAPE),
)  # fmt: skip

SHIFTS = 4 * torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


def read(qweight, qzeros, scales, unpack, unpack_zeros=None, offset=0):
    group = len(qweight) // len(scales)
    zeros = (unpack_zeros or unpack)(qzeros).repeat_interleave(group, dim=0) + offset
    return ((unpack(qweight) - zeros) * scales.repeat_interleave(group, dim=0)).float().T


def masked(words):
    return ((words.unsqueeze(-1) >> SHIFTS) & 15).flatten(1)


def signed_top(words):
    shifted = words.unsqueeze(-1) >> SHIFTS
    return torch.where(SHIFTS < 28, shifted & 15, shifted).flatten(1)


def absolute_top(qweight, qzeros, scales):
    return read(qweight, qzeros, scales, lambda words: signed_top(words).abs())


def adds_eight(qweight, qzeros, scales):
    def lifted(words):
        codes = signed_top(words)
        return torch.where(codes < 0, codes + 8, codes)

    return read(qweight, qzeros, scales, lifted)


def forgets_the_zeros(qweight, qzeros, scales):
    return read(qweight, qzeros, scales, masked, signed_top)


def straight_order(qweight, qzeros, scales):
    return read(qweight, qzeros, scales, lambda words: ((words.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15).flatten(1))


def order_of_nibbles(qweight, qzeros, scales):
    """Takes the order of channels in a word for the order of nibbles."""
    shifts = 4 * torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    return read(qweight, qzeros, scales, lambda words: ((words.unsqueeze(-1) >> shifts) & 15).flatten(1))


def zero_minus_one(qweight, qzeros, scales):
    return read(qweight, qzeros, scales, masked, offset=1)


def not_transposed(qweight, qzeros, scales):
    return read(qweight, qzeros, scales, masked).T


def borrows(qweight, qzeros, scales):
    return read(qweight, qzeros, scales, lambda words: unpack_words(words).to(torch.int32))


BREAK = (
    (absolute_top, "random: all codes"), (adds_eight, "random: all codes"), (forgets_the_zeros, "random: all codes"),
    (straight_order, "exact: which nibble is which channel"), (order_of_nibbles, "exact: which nibble is which channel"),
    (zero_minus_one, "exact: which nibble is which channel"), (not_transposed, "shape"), (borrows, "shape"),
)  # fmt: skip


def search(weight, x, group, ratios=range(11), smallest=1e-4, judge=None):
    magnitude = x.abs().mean(0).clamp(min=smallest)
    best, least = None, float("inf")
    for ratio in ratios:
        scales = magnitude ** (ratio / 10)
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = quantise(weight * scales, 3, group, False).dequantise() / scales - weight
        loss = float((error if judge else x @ error.T).square().sum())
        if loss < least:
            best, least = scales, loss
    return best


def full_strength(weight, x, group):
    return search(weight, x, group, ratios=[10])


def judges_the_weights(weight, x, group):
    return search(weight, x, group, judge="weights")


def ones(weight, x, group):
    return torch.ones(weight.shape[1])


def the_other_way(weight, x, group):
    return 1 / search(weight, x, group)


def no_clamp(weight, x, group):
    magnitude = x.abs().mean(0)
    return search(weight, x, group) * torch.where(magnitude > 0, 1.0, 0.0)


def gives_up_at_zeros(weight, x, group):
    """A channel of zeros makes every strength but 0 a division by 0."""
    return search(weight, x, group, smallest=0.0)


def per_output(weight, x, group):
    return torch.ones(len(weight))


def scales_its_input(weight, x, group):
    found = search(weight, x, group)
    x.mul_(-1)
    return found


STRETCH = (
    (per_output, "shape: one scale per input channel"), (full_strength, "exact: weights that lose nothing"),
    (ones, "random: large channels gain"),
    (judges_the_weights, "random: large channels gain"), (the_other_way, "random: never worse than rounding to nearest"),
    (no_clamp, "edges: channels that are always 0"), (gives_up_at_zeros, "edges: channels that are always 0"),
    (scales_its_input, "state: inputs unchanged"),
)  # fmt: skip

WRONG = {"3.2 core": CORE, "3.2 break": BREAK, "3.2 stretch": STRETCH}
