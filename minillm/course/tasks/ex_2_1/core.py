"""2.1 core: write a linear layer that multiplies whole numbers of 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm import LLM, SamplingParams
from minillm.bench.quality import logprobs
from minillm.course.expect import Mismatch, expect_at_most, expect_equal, expect_shape, unchanged
from minillm.course.task import NamedCheck, Seam, Task
from minillm.course.tasks.ex_2_1.common import whole_numbers
from minillm.course.tasks.ex_3_2.common import PROMPTS, TINY
from minillm.model.transformer import Transformer
from minillm.quant.linear import PlainLinear
from minillm.quant.smooth import migration, rounded_product, search_migration
from minillm.quant.w8a8 import W8A8Linear, quantise_rows

OUTLIER = 5
"""The channel that is large in the inputs below."""


def _made(cls: Any, weight: Tensor, bias: Tensor | None = None, peak: Tensor | None = None) -> tuple[Any, dict[str, Any]]:
    method = cls() if peak is None else cls(peak)
    packed = method.pack(weight, bias)
    if not isinstance(packed, dict) or not all(t is None or isinstance(t, Tensor) for t in packed.values()):
        raise Mismatch(f"pack gives a dict of tensors, got {packed!r:.80}")
    return method, packed


def _outliers(rows: int = 40, width: int = 64, factor: float = 60.0) -> Tensor:
    x = torch.randn(rows, width)
    x[:, OUTLIER] *= factor
    return x


def _error(method: Any, packed: Any, weight: Tensor, x: Tensor) -> float:
    """Mean squared error of the product, relative to the product."""
    exact = x.double() @ weight.double().t()
    error = float((method.apply(packed, x).double() - exact).square().mean() / exact.square().mean())
    return error if error == error else float("inf")


def _core_shapes(cls: Any) -> None:
    for out, width, dtype in ((6, 32, torch.float32), (3, 48, torch.bfloat16)):
        weight, bias = torch.randn(out, width).to(dtype), torch.randn(out).to(dtype)
        method, packed = _made(cls, weight, bias)
        expect_shape(method.apply(packed, torch.randn(5, width).to(dtype)), [5, out], dtype, "apply to 5 rows")
        expect_shape(method.unpack(packed), [out, width], dtype, "unpack")


def _core_by_hand(cls: Any) -> None:
    """Whole numbers whose largest is 127 lose nothing."""
    weight, x = whole_numbers(4, 16), whole_numbers(3, 16)
    method, packed = _made(cls, weight)
    expect_equal(method.unpack(packed), weight, atol=1e-3, what="a weight of whole numbers, unpacked")
    expect_equal(method.apply(packed, x), x @ weight.t(), atol=1.0, what="a product of whole numbers")


def _core_bias(cls: Any) -> None:
    weight, x, bias = whole_numbers(4, 16), 2 * whole_numbers(3, 16), torch.tensor([1000.0, -2000.0, 0.0, 500.0])
    method, packed = _made(cls, weight, bias)
    expect_equal(method.apply(packed, x), x @ weight.t() + bias, atol=2.0, what="with a bias, tokens of scale 2")


def _core_random(cls: Any) -> None:
    for size in (1.0, 1e-3, 50.0):
        weight, x = torch.randn(64, 96) * size, torch.randn(64, 96) / size
        method, packed = _made(cls, weight)
        expect_at_most(_error(method, packed, weight, x), 1.4e-4, f"relative error of the product, weights of size {size:g}")


def _core_rows_apart(cls: Any) -> None:
    """A row of weights, and a token, a thousand times as large as the others."""
    weight, x = torch.randn(6, 64), torch.randn(5, 64)
    weight[2] *= 1000
    method, packed = _made(cls, weight)
    small = [n for n in range(6) if n != 2]
    exact = (x @ weight.t())[:, small]
    expect_at_most(float((method.apply(packed, x)[:, small] - exact).square().mean() / exact.square().mean()), 4e-4,
                   "relative error of the small outputs beside a large one")  # fmt: skip
    alone = method.apply(packed, x[:1])
    x[3] *= 1000
    expect_equal(method.apply(packed, x)[:1], alone, what="a token's result, alone and beside a token a thousand times as large")


def _core_migrates(cls: Any) -> None:
    weight, x = torch.randn(24, 64) * 0.1, _outliers()
    plain, smooth = _made(cls, weight), _made(cls, weight, peak=x.abs().amax(0))
    expect_at_most(_error(*smooth, weight, x) / _error(*plain, weight, x), 0.2, "error with the channels' peaks, of that without")
    expect_equal(smooth[0].unpack(smooth[1]), weight, atol=0.02, what="the weight that the layer multiplies unscaled inputs by")
    # peaks that make each channel's scale a power of two, and a weight that is whole numbers once it is multiplied by them
    whole, scale = whole_numbers(6, 16), 2.0 ** torch.randint(-3, 4, (16,))
    weight = whole / scale
    method, packed = _made(cls, weight, peak=scale**2 * weight.abs().amax(0))
    what = "a weight that √peak / √(its column's largest) makes whole numbers, unpacked and times that"
    expect_equal(method.unpack(packed) * scale, whole, atol=1e-2, what=what)


def _core_zeros(cls: Any) -> None:
    weight, x, bias = torch.randn(4, 16), torch.randn(3, 16), torch.randn(4)
    weight[1], x[2] = 0, 0
    method, packed = _made(cls, weight, bias)
    got = method.apply(packed, x)
    if not bool(torch.isfinite(got).all()):
        raise Mismatch(f"a token of zeros, or a row of zero weights, gives {float(got[~torch.isfinite(got)][0])}")
    expect_equal(got[2], bias, atol=1e-6, what="the product of a token of zeros: the bias")


def _core_dead(cls: Any) -> None:
    """A channel that never fired, and one whose weights are all 0."""
    weight, x = torch.randn(8, 32), torch.randn(6, 32)
    x[:, 3], weight[:, 7] = 0, 0
    method, packed = _made(cls, weight, peak=x.abs().amax(0))
    expect_at_most(_error(method, packed, weight, x), 1e-3, "relative error beside channels of zeros")


def _core_no_rows(cls: Any) -> None:
    method, packed = _made(cls, torch.randn(6, 32))
    expect_shape(method.apply(packed, torch.zeros(0, 32)), [0, 6], torch.float32, "apply to no rows")


def _core_long(cls: Any) -> None:
    """Sums beyond 2^24, where float32 skips odd numbers: whole numbers do not."""
    width = 4096
    weight, x = torch.full((2, width), 127.0), torch.full((1, width), 127.0)
    weight[1, 1:3] = torch.tensor([126.0, 127.0])
    method, packed = _made(cls, weight)
    got = method.apply(packed, x)
    expect_equal(got[0, 0] - got[0, 1], torch.tensor(127.0), atol=16.0, what="the difference of two sums of 4096 products")


def _core_state(cls: Any) -> None:
    weight, bias, x = torch.randn(6, 64), torch.randn(6), torch.randn(3, 64)
    with unchanged(weight=weight, bias=bias, x=x):
        method, packed = _made(cls, weight, bias, x.abs().amax(0))
        first = method.apply(packed, x)
        method.pack(torch.randn(4, 64), None)  # one object may serve several layers
        second = method.apply(packed, x)
    expect_equal(second, first, what="the first layer's product after another layer was packed")


def _core_engine(cls: Any) -> None:
    """The engine on these layers: near the plain model, and every answer as if it were alone."""
    plain = Transformer.random(TINY, dtype=torch.float64)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    llm = LLM(plain, dtype="float64", block_size=4, num_blocks=24, max_num_batched_tokens=5, quantization=cls())
    together = [o.token_ids for o in llm.generate(list(PROMPTS), params)]
    alone = [llm.generate(p, params)[0].token_ids for p in PROMPTS]
    expect_equal(alone, together, what="tokens alone, against tokens in a batch")
    ours, theirs = (logprobs(m, [PROMPTS[0]])[0] for m in (llm.model, plain))
    kl = float((theirs.exp() * (theirs - ours)).sum(-1).mean())
    expect_at_most(round(kl, 5), 0.01, "KL between the plain model's next tokens and yours, in nats")
    if kl < 1e-9:
        raise Mismatch("the engine's logits are those of before: nothing was rounded")


class _Products(TorchDispatchMode):
    """Notes the dtypes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.floats = self.whole = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.split("::")[1] in ("mm", "addmm", "bmm", "matmul", "linear", "_int_mm", "qlinear_pointwise", "baddbmm", "mv"):
            matrices = [a for a in args if isinstance(a, Tensor) and a.dim() >= 2]
            if any(m.is_floating_point() for m in matrices):
                self.floats += 1
            else:
                self.whole += 1
        return func(*args, **(kwargs or {}))


def _core_budget(cls: Any) -> None:
    out, width = 48, 256
    method, packed = _made(cls, torch.randn(out, width), None, torch.rand(width) + 0.5)
    held = sum(t.untyped_storage().nbytes() for t in packed.values() if t is not None)
    expect_at_most(held, out * width + 4 * out + 4 * width + 64, f"bytes held by {out} × {width} weights")
    with _Products() as seen:
        method.apply(packed, torch.randn(20, width))
    if seen.floats or not seen.whole:
        raise Mismatch(
            f"apply ran {seen.floats} matrix products of floating-point numbers and {seen.whole} of whole ones, "
            "expected 0 and at least 1"
        )


CORE = Task(
    "2.1 core",
    "Write a linear layer in 8-bit arithmetic",
    (
        NamedCheck("shape: what pack, unpack and apply give", _core_shapes, hint=2),
        NamedCheck("exact: whole numbers lose nothing", _core_by_hand, hint=1),
        NamedCheck("exact: the bias comes after the scales", _core_bias, hint=3),
        NamedCheck("random: the error of rounding, no more", _core_random, hint=1),
        NamedCheck("random: large rows beside small ones", _core_rows_apart, hint=2),
        NamedCheck("random: migration makes an outlier channel harmless", _core_migrates, hint=3),
        NamedCheck("edges: tokens and rows of zeros", _core_zeros, hint=3),
        NamedCheck("edges: channels of zeros", _core_dead, hint=3),
        NamedCheck("edges: no rows", _core_no_rows, hint=2),
        NamedCheck("edges: long sums", _core_long, hint=1),
        NamedCheck("state: inputs unchanged, layers apart", _core_state, hint=2),
        NamedCheck("engine: near the plain model, alone as in a batch", _core_engine, hint=2),
        NamedCheck("budget: bytes held, and products of whole numbers", _core_budget, hint=3),
    ),
    (
        "y[m, n] = token[m] · channel[n] · Σ x_codes[m, k] · w_codes[n, k]. A scale per token and one per output channel can be\n"
        "taken out of the sum; one per input channel cannot: it must go into the weight before rounding.",
        "weight [out, in] → codes int8 [out, in], channel [out]; x [rows, in] → codes int8 [rows, in], token [rows, 1].\n"
        "torch._int_mm(x_codes, w_codes.t()) gives the sums, int32 [rows, out].",
        "s = (peak.clamp(min=1e-5) / weight.abs().amax(0).clamp(min=1e-5)).sqrt(); channel = (weight * s).abs().amax(1) / 127;\n"
        "x = x / s; token = x.abs().amax(1, keepdim=True) / 127, neither scale ever 0; sums.float() * token * channel + bias.",
    ),
    Seam("quantization", "linear layers", lambda cls: {"quantization": cls()}),
    (W8A8Linear, PlainLinear, quantise_rows, rounded_product, migration, search_migration),
)
