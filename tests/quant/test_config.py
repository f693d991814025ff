# ruff: noqa: E501
"""What may be asked for, and what is said about the rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minillm import EngineConfig
from minillm.quant.config import QuantConfig
from minillm.quant.linear import PlainLinear


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"method": "gguf"}, "method must be one of 'rtn', 'awq', 'gptq', 'w8a8', 'fp8', got 'gguf'"), ({"bits": 5}, "bits must be one of 2, 3, 4, 8, got 5"),
        ({"bits": True}, "bits"), ({"bits": 4.5}, "bits"), ({"head_bits": 16}, "head_bits must be one of 2, 3, 4, 8, got 16"),
        ({"group": 0}, "group must be a whole number of at least 1, or -1 for one per channel, got 0"), ({"group": -2}, "got -2"),
        ({"group": 32.0}, "32.0"), ({"group": None}, "None"), ({"symmetric": 1}, "symmetric must be True or False, got 1"),
        ({"dense_from": 0}, "dense_from must be a whole number of at least 1, None or 'auto', got 0"), ({"dense_from": "never"}, "never"),
        ({"calibration": 5}, "calibration must be .*, got 5"), ({"calibration": [5, 6]}, "calibration must be .*5, 6"),
        ({"calibration": [None]}, "calibration must be .*None"), ({"calibration": b"ab"}, "calibration must be"),
        ({"method": "w8a8", "bits": 4}, "bits of 'w8a8' is always 8, got 4"), ({"method": "fp8", "group": 64}, "group of 'fp8' is always -1, got 64"),
        ({"method": "w8a8", "symmetric": False}, "symmetric of 'w8a8' is always True, got False"),
        ({"migration": 1.1}, "migration must be 0 to 1, None or 'search', got 1.1"), ({"migration": True}, "got True"), ({"migration": "most"}, "most"),
        ({"kernel": "cuda"}, "kernel must be one of 'auto', 'torch', 'triton', got 'cuda'"), ({"kernel": None}, "got None"),
        ({"kernel": "triton", "bits": 8}, "kernel='triton' multiplies by 4 bits, got bits=8"),
        ({"bits": 4.0}, "bits must be one of 2, 3, 4, 8, got 4.0"), ({"head_bits": 8.0}, "head_bits must be one of 2, 3, 4, 8, got 8.0"),
        ({"bits": torch.tensor(4)}, "got tensor.4."), ({"bits": np.array([4, 8])}, "bits must be .*array"), ({"group": -1.0}, "got -1.0"),
        ({"group": np.array([1, 2])}, "group must be .*array"), ({"dense_from": np.array(["auto"])}, "dense_from must be .*array"),
        ({"kernel": np.array(["auto", "torch"])}, "kernel must be .*array"), ({"method": np.array(["rtn", "awq"])}, "method must be .*array"),
        ({"migration": np.array([0.1, 0.2])}, "migration must be .*array"), ({"method": "w8a8", "bits": 8.0}, "bits of 'w8a8' is always 8, got 8.0"),
        ({"method": "fp8", "group": np.array([-1, 2])}, "group of 'fp8' is always -1, got array"), ({"group": torch.tensor(-1)}, "got tensor"),
        ({"migration": float("nan")}, "got nan"), ({"calibration": "text"}, "calibration must be a list"), ({"calibration": []}, "calibration must be a list"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_value(wrong, named):
    with pytest.raises(ValueError, match=named):
        QuantConfig(**wrong)


@pytest.mark.parametrize("good", [None, "rtn", "awq", "gptq", "w8a8", "fp8", QuantConfig(bits=3), PlainLinear()])
def test_the_engine_takes_a_name_a_config_or_a_method(good):
    assert EngineConfig(quantization=good).quantization == good


@pytest.mark.parametrize("bad", ["int4", "", 4, True, object(), QuantConfig])
def test_the_engine_refuses_anything_else(bad):
    with pytest.raises(ValueError, match="quantization must be"):
        EngineConfig(quantization=bad)


def test_a_config_says_what_it_is():
    assert QuantConfig("awq").description == "AWQ, 4 bits, asymmetric, groups of 64, head in 8 bits"
    assert QuantConfig("w8a8").description == "W8A8, weights per channel and activations per token, migration searched, head in 8 bits"
    assert "migration none" in QuantConfig("w8a8", migration=None).description
    assert QuantConfig("fp8", head_bits=None).description.endswith("head as it was")
    channel = QuantConfig(bits=3, group=-1, symmetric=True, head_bits=None)
    assert channel.description == "RTN, 3 bits, symmetric, per channel, head as it was"
