"""AWQ (Lin et al. 2023, arXiv 2306.00978): scale up the channels with large inputs before rounding, and their inputs down.

y = (W · diag(s)) (x / s) is the same product. Rounding makes an error of up to half a step of a group's scale, which a few larger
columns hardly change; after the division by s it is s times smaller where it is multiplied by the largest inputs. The division
is folded into whatever makes x: the norm before, the rows of V, or the rows of the up projection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.quant.calibrate import Seen
from minillm.quant.grid import group_size, round_trip

RATIOS = tuple(i / 10 for i in range(11))


def search_scales(weight: Tensor, seen: Seen, bits: int, group: int, symmetric: bool, name: str = "the weight") -> Tensor:
    """The scale of each input channel, [in], with the least loss on the inputs seen among magnitude ** ratio for ratios 0 … 1.

    Ratio 0 is all ones: the result is never worse than rounding to nearest.
    """
    size = group_size(weight.shape[1], group, name)
    best, least = torch.ones_like(seen.magnitude), float("inf")
    for ratio in RATIOS:
        scales = _normalised(seen.magnitude.clamp(min=1e-4) ** ratio)
        loss = seen.loss(weight, round_trip(weight * scales, bits, size, symmetric).div_(scales))
        if loss < least:
            best, least = scales, loss
    return best


def _normalised(scales: Tensor) -> Tensor:
    return scales / (scales.max() * scales.min()).sqrt()
