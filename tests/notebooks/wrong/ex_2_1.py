"""Wrong answers to exercise 2.1, each with the check that must catch it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minillm.quant.fp8 import to_e4m3
from minillm.quant.w8a8 import W8A8Linear, quantise_rows


class Right:
    """What the core's answers below are variations of."""

    def __init__(self, peak=None):
        self.peak = peak

    def smooth(self, weight):
        if self.peak is None:
            return torch.ones(weight.shape[1])
        return self.floor(self.peak) ** 0.5 / self.floor(weight.abs().amax(0)) ** 0.5

    def floor(self, values):
        return values.clamp(min=1e-5)

    def channel(self, weight):
        return weight.abs().amax(1) / 127

    def token(self, x):
        return x.abs().amax(1, keepdim=True) / 127

    def divided(self, packed, x):
        return x.float() / packed["smooth"]

    def pack(self, weight, bias):
        smooth = self.smooth(weight.float())
        migrated = weight.float() * smooth
        channel = self.channel(migrated).clamp(min=1e-30)
        codes = (migrated / channel[:, None]).round().to(torch.int8)
        return {"codes": codes, "channel": channel, "smooth": smooth, "like": weight.new_empty(0), "bias": bias}

    def unpack(self, packed):
        return (packed["codes"] * packed["channel"][:, None] / packed["smooth"]).to(packed["like"].dtype)

    def sums(self, codes, packed):
        return torch._int_mm(codes, packed["codes"].t()).float()

    def apply(self, packed, x):
        x32 = self.divided(packed, x)
        token = self.token(x32).clamp(min=1e-30)
        y = self.sums((x32 / token).round().to(torch.int8), packed) * token * packed["channel"]
        return (y if packed["bias"] is None else y + packed["bias"].float()).to(x.dtype)


class InFloat32(Right):
    """Gives float32 whatever came."""

    def apply(self, packed, x):
        return super().apply(packed, x.float())


class ForgetsTheWeight(Right):
    """Only the peaks decide: right wherever all columns of the weight are alike."""

    def smooth(self, weight):
        return super().smooth(weight) if self.peak is None else self.floor(self.peak) ** 0.5


class OneMaximumForAllColumns(Right):
    def smooth(self, weight):
        return super().smooth(weight) if self.peak is None else (self.floor(self.peak) / weight.abs().max()) ** 0.5


class MovesLess(Right):
    def smooth(self, weight):
        return super().smooth(weight) ** 0.5


class Over128(Right):
    """The largest number becomes code 128, and wraps around."""

    def token(self, x):
        return x.abs().amax(1, keepdim=True) / 128


class ScalesTheBias(Right):
    def apply(self, packed, x):
        x32 = self.divided(packed, x)
        token = self.token(x32).clamp(min=1e-30)
        y = self.sums((x32 / token).round().to(torch.int8), packed)
        return ((y + (0 if packed["bias"] is None else packed["bias"].float())) * token * packed["channel"]).to(x.dtype)


class Truncates(Right):
    def apply(self, packed, x):
        x32 = self.divided(packed, x)
        token = self.token(x32).clamp(min=1e-30)
        y = self.sums((x32 / token).to(torch.int8), packed) * token * packed["channel"]
        return (y if packed["bias"] is None else y + packed["bias"].float()).to(x.dtype)


class OneScaleForTheWeight(Right):
    def channel(self, weight):
        return (weight.abs().amax() / 127).expand(len(weight)).clone()


class OneScaleForAllTokens(Right):
    def token(self, x):
        return (x.abs().amax() / 127).expand(len(x), 1) if len(x) else x.new_zeros(0, 1)


class ForgetsToDivide(Right):
    """Migrates the scale into the weight and leaves the activations as they are."""

    def divided(self, packed, x):
        return x.float()


class IgnoresThePeaks(Right):
    def smooth(self, weight):
        return torch.ones(weight.shape[1])


class NoFloor(Right):
    """A channel that never fired has scale 0."""

    def floor(self, values):
        return values


class KeepsOnSelf(Right):
    def pack(self, weight, bias):
        packed = super().pack(weight, bias)
        self.kept = packed["channel"]
        return packed

    def apply(self, packed, x):
        return super().apply(packed | {"channel": self.kept}, x)


class Dequantises(Right):
    """Rounds everything, and multiplies floating-point numbers."""

    def sums(self, codes, packed):
        return F.linear(codes.float(), packed["codes"].float())


class KeepsTheWeight(Right):
    def pack(self, weight, bias):
        return super().pack(weight, bias) | {"copy": weight.clone()}


class Borrows(Right):
    def apply(self, packed, x):
        quantise_rows(x)
        return super().apply(packed, x)


class Inherits(W8A8Linear):
    def __init__(self, peak=None):
        super().__init__()


CORE = (
    (InFloat32, "shape: what pack, unpack and apply give"), (Borrows, "shape: what pack, unpack and apply give"),
    (Inherits, "shape: what pack, unpack and apply give"),
    (Over128, "exact: whole numbers lose nothing"), (ScalesTheBias, "exact: the bias comes after the scales"),
    (Truncates, "random: the error of rounding, no more"),
    (OneScaleForTheWeight, "random: large rows beside small ones"),
    (OneScaleForAllTokens, "random: large rows beside small ones"),
    (ForgetsToDivide, "random: migration makes an outlier channel harmless"),
    (IgnoresThePeaks, "random: migration makes an outlier channel harmless"),
    (ForgetsTheWeight, "random: migration makes an outlier channel harmless"),
    (OneMaximumForAllColumns, "random: migration makes an outlier channel harmless"),
    (MovesLess, "random: migration makes an outlier channel harmless"),
    (NoFloor, "edges: channels of zeros"),
    (KeepsOnSelf, "state: inputs unchanged, layers apart"),
    (Dequantises, "budget: bytes held, and products of whole numbers"),
    (KeepsTheWeight, "budget: bytes held, and products of whole numbers"),
)  # fmt: skip


def product(x, codes, channel, scale):
    scale = scale.clamp(min=1e-12)
    return torch._int_mm((x / scale).round().clamp(-127, 127).to(torch.int8), codes.t()).float() * scale * channel


def mean_of_the_batch(x, codes, channel):
    return product(x, codes, channel, (x.abs().amax(1).mean() / 127).expand(len(x), 1))


def by_channel(x, codes, channel):
    """A maximum along the wrong dimension: it cannot be taken out of the sum."""
    scale = (x.abs().amax(0, keepdim=True) / 127).clamp(min=1e-12)
    return torch._int_mm((x / scale).round().to(torch.int8), codes.t()).float() * scale.mean() * channel


def twice_the_mean(x, codes, channel):
    """A scale per token, from its mean: what is large is cut off."""
    return product(x, codes, channel, x.abs().mean(1, keepdim=True) * 2 / 127)


def signed_peak(x, codes, channel):
    """The largest number, not the largest magnitude."""
    return product(x, codes, channel, x.amax(1, keepdim=True) / 127)


def floor_too_high(x, codes, channel):
    """Keeps the scale away from 0, and rounds small tokens to nothing."""
    return product(x, codes, channel, (x.abs().amax(1, keepdim=True) / 127).clamp(min=1e-2))


def divides_in_place(x, codes, channel):
    scale = (x.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
    return torch._int_mm(x.div_(scale).round().to(torch.int8), codes.t()).float() * scale * channel


BREAK = (
    (mean_of_the_batch, "random: tokens of all sizes"), (by_channel, "shape: one token"), (twice_the_mean, "shape: one token"),
    (signed_peak, "shape: one token"), (floor_too_high, "random: tokens of all sizes"),
    (divides_in_place, "state: inputs unchanged"),
)  # fmt: skip


def rounded(x, largest=448.0, lowest=-6, to_whole=torch.round):
    x = x.clamp(-largest, largest)
    exponent = torch.frexp(x)[1] - 1
    if lowest is not None:
        exponent = exponent.clamp(min=lowest)
    step = torch.ldexp(torch.ones_like(x), exponent - 3)
    return to_whole(x / step) * step


def truncates(x):
    return rounded(x, to_whole=torch.trunc)


def ties_upwards(x):
    return rounded(x, to_whole=lambda v: torch.floor(v + 0.5))


def no_subnormals(x):
    return rounded(x, lowest=None)


def flushes(x):
    got = rounded(x)
    return torch.where(got.abs() < 2.0**-6, torch.zeros_like(got), got)


def saturates_late(x):
    return rounded(x, largest=480.0)


def saturates_early(x):
    return rounded(x, largest=240.0)


def hides_nan(x):
    return rounded(x.nan_to_num(0.0, posinf=448.0, neginf=-448.0))


def borrows(x):
    to_e4m3(x)
    return rounded(x)


def in_place(x):
    return x.copy_(rounded(x))


STRETCH = (
    (truncates, "exact: halfway cases"), (ties_upwards, "exact: halfway cases"), (no_subnormals, "random: many sizes"),
    (flushes, "exact: the numbers of the format"), (saturates_late, "edges: beyond the largest"),
    (saturates_early, "exact: the numbers of the format"), (hides_nan, "edges: NaN"), (borrows, "shape: as it came"),
    (in_place, "state: inputs unchanged"),
)  # fmt: skip

WRONG = {"2.1 core": CORE, "2.1 break": BREAK, "2.1 stretch": STRETCH}
