"""Linear layers: two storage formats of one product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minillm import LLM
from minillm.quant import linear as module
from minillm.quant.linear import Linear, LinearMethod, PlainLinear, PrepackedLinear, Traffic, default_method, prepack_available

from ..strategies import tiny_model

needs_prepacking = pytest.mark.skipif(not prepack_available(), reason="this CPU or torch build has no oneDNN linear in bfloat16")
METHODS = [PlainLinear(), pytest.param(PrepackedLinear(), marks=needs_prepacking)]
SHAPES = [(1, 1), (7, 3), (33, 80), (96, 64), (129, 577)]  # [out, in], few of them powers of two
ROWS = [0, 1, 2, 5, 33]


def tensors(out_features: int, in_features: int, rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """weight [out, in], bias [out], x [rows, in]."""
    generator = torch.Generator().manual_seed(out_features * 1000 + in_features)
    shapes = [(out_features, in_features), (out_features,), (rows, in_features)]
    return tuple(torch.randn(s, generator=generator).to(dtype) for s in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_both_methods_multiply_in_bfloat16(method: LinearMethod, with_bias: bool, shape: tuple[int, int], rows: int) -> None:
    weight, bias, x = tensors(*shape, rows)
    y = Linear(weight, bias if with_bias else None, method)(x)
    exact = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    assert y.dtype == torch.bfloat16 and y.shape == (rows, shape[0])
    # sums are kept in 32 bits and rounded once, to 8 significant bits: half a unit in the last place is 1/256 of the value.
    # The second term is for sums in which large terms cancel.
    torch.testing.assert_close(y.double(), exact, rtol=1 / 256, atol=1e-5 * shape[1])


@needs_prepacking
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_prepacking_changes_at_most_the_last_bit(shape: tuple[int, int], rows: int) -> None:
    weight, bias, x = tensors(*shape, rows)
    plain, packed = (Linear(weight, bias, m)(x).float() for m in (PlainLinear(), PrepackedLinear()))
    # the two kernels add in different orders, so that a sum close to the middle between two bfloat16 may go either way
    torch.testing.assert_close(packed, plain, rtol=1 / 128, atol=1e-5 * shape[1])
    differ = int((packed != plain).sum())
    assert differ <= 1 + packed.numel() // 20


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_unpacking_gives_the_packed_weight_back(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias, _ = tensors(*shape, 1, dtype)
    method = PlainLinear()
    assert torch.equal(method.unpack(method.pack(weight, bias)), weight)


@needs_prepacking
@pytest.mark.parametrize("shape", SHAPES)
def test_unpacking_gives_a_prepacked_weight_back(shape: tuple[int, int]) -> None:
    weight, bias, _ = tensors(*shape, 1)
    dense, kept = Linear(weight, bias, PrepackedLinear()).dense()
    assert dense.layout == torch.strided and torch.equal(dense, weight) and torch.equal(kept, bias)
    assert Linear(weight, None, PrepackedLinear()).dense()[1] is None


@pytest.mark.parametrize("method", METHODS)
def test_the_callers_weight_is_not_changed_and_may_be_a_view(method: LinearMethod) -> None:
    weight, bias, x = tensors(12, 40, 3)
    kept = weight.clone()
    for view in (weight, weight[:, ::2], weight[::2], weight.T.contiguous().T):
        y = Linear(view, None, method)(x[:, : view.shape[1]])
        torch.testing.assert_close(y, F.linear(x[:, : view.shape[1]], view.contiguous()), rtol=1 / 128, atol=1e-3)
    assert torch.equal(weight, kept)


@pytest.mark.parametrize("method", METHODS)
def test_rows_may_be_a_slice_of_something_wider(method: LinearMethod) -> None:
    weight, bias, x = tensors(12, 40, 6)
    layer = Linear(weight, bias, method)
    wide = torch.full((6, 100), float("nan"), dtype=torch.bfloat16)
    wide[:, 30:70] = x
    torch.testing.assert_close(layer(wide[:, 30:70]), layer(x), rtol=1 / 128, atol=1e-3)
    torch.testing.assert_close(layer(x[::2]), layer(x)[::2], rtol=1 / 128, atol=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_nbytes_counts_weight_and_bias(method: LinearMethod) -> None:
    weight, bias, _ = tensors(64, 96, 1)
    assert Linear(weight, None, method).nbytes() == 64 * 96 * 2
    assert Linear(weight, bias, method).nbytes() == 64 * 96 * 2 + 64 * 2


@pytest.mark.parametrize("dtype, name", [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")])
def test_work_reads_the_weight_once_however_many_rows(dtype: torch.dtype, name: str) -> None:
    weight, bias, _ = tensors(33, 80, 1, dtype)
    layer = Linear(weight, bias, PlainLinear())
    for rows in (1, 7):
        work = layer.work(rows)
        assert work.flops == {name: 2 * rows * 80 * 33}
        assert work.weight_bytes == (80 * 33 + 33) * dtype.itemsize
        assert work.activation_bytes == rows * (80 + 33) * dtype.itemsize and work.launches == 1
        assert work.kv_read_bytes == work.kv_write_bytes == 0


def test_prepacking_is_for_bfloat16_on_a_cpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "prepack_available", lambda: True)
    assert type(default_method(torch.bfloat16, "cpu")) is PrepackedLinear
    for dtype, device in [(torch.float32, "cpu"), (torch.float64, "cpu"), (torch.float16, "cpu"), (torch.bfloat16, "cuda")]:
        assert type(default_method(dtype, device)) is PlainLinear
    monkeypatch.setattr(module, "prepack_available", lambda: False)
    assert type(default_method(torch.bfloat16, torch.device("cpu"))) is PlainLinear


def test_a_torch_without_onednn_has_no_prepacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not prepack_available()


def test_a_learners_own_method_may_keep_whatever_it_wants() -> None:
    class Halves:
        """Two halves of the weight, multiplied one after the other."""

        def pack(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor | None]:
            return {"first": weight[:, :20].contiguous(), "second": weight[:, 20:].contiguous(), "bias": bias}

        def apply(self, packed: Any, x: Tensor) -> Tensor:
            return F.linear(x[:, :20], packed["first"], packed["bias"]) + F.linear(x[:, 20:], packed["second"])

        def unpack(self, packed: Any) -> Tensor:
            return torch.cat([packed["first"], packed["second"]], 1)

    weight, bias, x = tensors(12, 40, 3, torch.float64)
    layer = Linear(weight, bias, Halves())
    torch.testing.assert_close(layer(x), F.linear(x, weight, bias))
    dense, kept = layer.dense()
    assert torch.equal(dense, weight) and torch.equal(kept, bias) and layer.nbytes() == (12 * 40 + 12) * 8


class Says(PlainLinear):
    """A learner's method, some parts of which give what they should not."""

    def __init__(self, **answers: Any):
        self.answers = answers

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        return self.answers.get("pack", {"weight": weight, "bias": bias})

    def traffic(self, packed: Any, rows: int) -> Any:
        return self.answers.get("traffic", Traffic(rows))


class ForLayer:
    def __init__(self, chosen: Any):
        self.chosen = chosen

    def for_layer(self, name: str) -> Any:
        return self.chosen if "o_proj" in name else PlainLinear()


@pytest.mark.parametrize(
    "method, why",
    [(Says(pack=None), "pack of Says must return the tensors to keep by name.*, got None"),
     (Says(pack={"w": [1]}), "got .'w': .1.."),
     (Says(pack=[torch.ones(2)]), "pack of Says"), (Says(traffic=5), "traffic of Says must return a Traffic, got 5"),
     (ForLayer(None), r"for_layer\('model.layers.0.self_attn.o_proj'\) of ForLayer must be .*, got None, which lacks pack"),
     (ForLayer("rtn"), "must be a LinearMethod, got 'rtn'")],
    ids=["no pack", "a list in a pack", "a list", "a number for traffic", "no method", "a name"],
)  # fmt: skip
def test_a_method_that_gives_what_nobody_can_use_is_named_before_an_engine_runs(method: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        LLM(tiny_model(), quantization=method, num_blocks=8, block_size=4)
