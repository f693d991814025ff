"""Wrong answers to exercise 3.3, each with the check that must catch it."""

from __future__ import annotations

import torch

from minillm.cache.quantised_kv import QuantisedKVStore
from minillm.course.labs.kv_quantisation import lopsided


class Right:
    """What the answers to core and break below are variations of."""

    largest = 127

    def __init__(self, config, num_slots, dtype, device):
        shape, layers = (num_slots, 2, config.num_kv_heads), range(config.num_layers)
        self.num_slots, self.dtype = num_slots, dtype
        self.codes = [torch.zeros(*shape, config.head_dim, dtype=torch.int8, device=device) for _ in layers]
        self.reach = [torch.zeros(shape, dtype=torch.float32, device=device) for _ in layers]
        self.bytes_per_token = sum(t[0].nbytes for t in (*self.codes, *self.reach))

    def reach_of(self, kv):
        return kv.abs().amax(-1).float()

    def unit(self, reach):
        return reach.clamp(min=1e-30).unsqueeze(-1)

    def rounded(self, scaled):
        return scaled.clamp(-127, 127).round().to(torch.int8)

    def write(self, layer, slots, k, v):
        kv = torch.stack((k, v), dim=1)
        reach = self.reach_of(kv)
        self.codes[layer][slots] = self.rounded(kv / self.unit(reach) * self.largest)
        self.reach[layer][slots] = reach

    def read(self, layer, slots):
        kv = self.codes[layer][slots].to(torch.promote_types(self.dtype, torch.float32)) / self.largest
        kv = (kv * self.reach[layer][slots].unsqueeze(-1)).to(self.dtype)
        return kv[:, :, 0], kv[:, :, 1]


class PerStep(Right):
    """One reach per head for all tokens of a step."""

    def reach_of(self, kv):
        return kv.abs().amax((0, -1)).float().expand(kv.shape[:-1])


class PerToken(Right):
    """One reach for all heads of a token, K and V apart."""

    def reach_of(self, kv):
        return kv.abs().amax((2, 3)).float().unsqueeze(-1).expand(kv.shape[:-1])


class KForV(Right):
    def reach_of(self, kv):
        return super().reach_of(kv)[:, :1].expand(-1, 2, -1)


class Wraps(Right):
    """The largest number becomes 128, which int8 has not."""

    largest = 128

    def rounded(self, scaled):
        return scaled.round().to(torch.int32).to(torch.int8)


class Truncates(Right):
    def rounded(self, scaled):
        return scaled.clamp(-127, 127).to(torch.int8)


class DividesByNothing(Right):
    """0 / 0 in a row of zeros; kept as the codes' reach too, so that it is read back."""

    def write(self, layer, slots, k, v):
        super().write(layer, slots, k, v)
        reach = self.reach[layer][slots]
        self.reach[layer][slots] = reach / reach * reach


class LeastReach(Right):
    """Keeps the reach away from 0, and rounds small rows to nothing."""

    def reach_of(self, kv):
        return super().reach_of(kv).clamp(min=1e-2)


class SharedByLayers(Right):
    def __init__(self, *parts):
        super().__init__(*parts)
        self.reach = self.reach[:1] * len(self.reach)


class OnlyGrows(Right):
    """Never gives a coarse grid up again."""

    def write(self, layer, slots, k, v):
        before = self.reach[layer][slots]
        self.reach_of = lambda kv: torch.maximum(Right.reach_of(self, kv), before)
        super().write(layer, slots, k, v)


class KeepsThem(Right):
    def __init__(self, config, num_slots, dtype, device):
        super().__init__(config, num_slots, dtype, device)
        self.kept = torch.zeros(config.num_layers, num_slots, 2, config.num_kv_heads, config.head_dim, dtype=dtype)


class SaysLess(Right):
    """Forgets that the reaches take room."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.bytes_per_token = sum(t[0].nbytes for t in self.codes)


class Widens(Right):
    """Gives float32 whatever was asked for."""

    def read(self, layer, slots):
        k, v = super().read(layer, slots)
        return k.float(), v.float()


class GivesAList(Right):
    def read(self, layer, slots):
        return list(super().read(layer, slots))


class SaysNothing(Right):
    def __init__(self, *parts):
        super().__init__(*parts)
        del self.bytes_per_token


class RoundsItsInput(Right):
    """Works in the caller's own memory."""

    def write(self, layer, slots, k, v):
        super().write(layer, slots, k, v)
        k.div_(self.unit(self.reach[layer][slots][:, 0])).mul_(self.largest)


class ScalesItsInput(Right):
    def write(self, layer, slots, k, v):
        super().write(layer, slots, k, v)
        k.div_(self.unit(self.reach[layer][slots][:, 0]))


class Borrows(QuantisedKVStore):
    def __init__(self, config, num_slots, dtype, device):
        made = QuantisedKVStore.allocate("int8", config, num_slots, dtype, device)
        super().__init__("int8", made.values, made.reaches, dtype)


SHAPE = "shape: what read gives"
CORE = (
    (Widens, SHAPE), (Borrows, SHAPE), (GivesAList, SHAPE), (SaysNothing, SHAPE),
    (Wraps, "exact: whole numbers up to 127"), (Truncates, "random: at most half a step off"),
    (DividesByNothing, "edges: rows of zeros, equal and tiny numbers"),
    (LeastReach, "edges: rows of zeros, equal and tiny numbers"),
    (PerStep, "edges: a large token among small ones"), (PerToken, "edges: a small head beside a large one"),
    (KForV, "edges: large K, small V"), (SharedByLayers, "edges: slots in any order, layers apart"),
    (OnlyGrows, "state: a slot is written again"), (ScalesItsInput, "state: inputs and what was read unchanged"),
    (RoundsItsInput, "state: inputs and what was read unchanged"),
    (KeepsThem, "budget: bytes held"), (SaysLess, "budget: bytes held"),
)  # fmt: skip


class Constant(Right):
    """Wide enough for what was tested."""

    def reach_of(self, kv):
        return torch.full(kv.shape[:-1], 1.0)


class TokenWide(Right):
    def reach_of(self, kv):
        return kv.abs().amax((1, 2, 3)).float()[:, None, None].expand(kv.shape[:-1])


class LargestSoFar(Right):
    most = 0.0

    def reach_of(self, kv):
        self.most = max(self.most, float(kv.abs().max()))
        return torch.full(kv.shape[:-1], self.most)


class MeanTimesFour(Right):
    """Cuts off what is far above the mean."""

    def reach_of(self, kv):
        return 2 * kv.abs().mean(-1).float()


BREAK = (
    (Constant, "random: tokens of different sizes"), (TokenWide, "edges: a small head beside a large one"),
    (LargestSoFar, "random: tokens of different sizes"), (PerStep, "random: tokens of different sizes"),
    (MeanTimesFour, "exact: one token"),
)  # fmt: skip


class RightKeys:
    def range(self, k):
        return k.amin(0, keepdim=True), k.amax(0, keepdim=True)

    def step(self, low, high):
        return ((high - low) / 15).clamp(min=1e-30)

    def halves(self, codes):
        return codes[..., ::2] | codes[..., 1::2] << 4

    def pairs(self, both):
        return torch.stack([both & 15, both >> 4], dim=-1).flatten(-2)

    def pack(self, k):
        k = k.float()
        low, high = self.range(k)
        step = self.step(low, high)
        codes = ((k - low) / step).round().clamp(0, 15).nan_to_num(0).to(torch.uint8)
        return {"codes": self.halves(codes), "low": low, "step": step}

    def unpack(self, packed):
        return packed["low"] + self.pairs(packed["codes"]).float() * packed["step"]


class ByToken(RightKeys):
    def range(self, k):
        return k.amin(-1, keepdim=True), k.amax(-1, keepdim=True)


class AroundZero(RightKeys):
    def range(self, k):
        reach = k.abs().amax(0, keepdim=True)
        return -reach, reach


class WithZero(RightKeys):
    """As for weights, where 0 must be one of the levels."""

    def range(self, k):
        low, high = super().range(k)
        return low.clamp(max=0), high.clamp(min=0)


class NoClamp(RightKeys):
    """0 / 0 where a channel is constant, and the result is kept."""

    def step(self, low, high):
        step = (high - low) / 15
        return step * step / step


class SixteenSteps(RightKeys):
    """The largest value of a channel is cut off."""

    def step(self, low, high):
        return super().step(low, high) * 15 / 16


class Signed(RightKeys):
    def pairs(self, both):
        return torch.stack([both & 15, both.view(torch.int8) >> 4], dim=-1).flatten(-2)


class ByteEach(RightKeys):
    def halves(self, codes):
        return codes

    def pairs(self, both):
        return both


class OnSelf(RightKeys):
    def pack(self, k):
        packed = super().pack(k)
        self.low = packed.pop("low")
        return packed

    def unpack(self, packed):
        return super().unpack(packed | {"low": self.low})


class ShiftsItsInput(RightKeys):
    def pack(self, k):
        packed = super().pack(k)
        k.sub_(packed["low"])
        return packed


class BorrowsKeys(RightKeys):
    def pack(self, k):
        return {"k": lopsided(4, (0,))(k)}

    def unpack(self, packed):
        return packed["k"].float()


STRETCH = (
    (BorrowsKeys, "shape: what pack and unpack give"), (OnSelf, "shape: what pack and unpack give"),
    (AroundZero, "exact: channels of sixteen equal steps"), (WithZero, "exact: channels of sixteen equal steps"),
    (SixteenSteps, "exact: channels of sixteen equal steps"), (Signed, "exact: channels of sixteen equal steps"),
    (ByToken, "exact: channels of sixteen equal steps"), (NoClamp, "edges: constant channels"),
    (ShiftsItsInput, "state: inputs unchanged"), (ByteEach, "budget: bytes held"),
)  # fmt: skip

WRONG = {"3.3 core": CORE, "3.3 break": BREAK, "3.3 stretch": STRETCH}
