# ruff: noqa: E501
"""What may be asked for, and what is said about the rest."""

from __future__ import annotations

import pytest

from minillm import EngineConfig
from minillm.quant.config import QuantConfig
from minillm.quant.linear import PlainLinear


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"method": "gguf"}, "method must be one of 'rtn', 'awq', 'gptq', got 'gguf'"), ({"bits": 5}, "bits must be one of 2, 3, 4, 8, got 5"),
        ({"bits": True}, "bits"), ({"bits": 4.5}, "bits"), ({"head_bits": 16}, "head_bits must be one of 2, 3, 4, 8, got 16"),
        ({"group": 0}, "group must be a whole number of at least 1, or -1 for one per channel, got 0"), ({"group": -2}, "got -2"),
        ({"group": 32.0}, "32.0"), ({"group": None}, "None"), ({"symmetric": 1}, "symmetric must be True or False, got 1"),
        ({"dense_from": 0}, "dense_from must be a whole number of at least 1, None or 'auto', got 0"), ({"dense_from": "never"}, "never"),
        ({"calibration": "text"}, "calibration must be a list"), ({"calibration": []}, "calibration must be a list"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_value(wrong, named):
    with pytest.raises(ValueError, match=named):
        QuantConfig(**wrong)


@pytest.mark.parametrize("good", [None, "rtn", "awq", "gptq", QuantConfig(bits=3), PlainLinear()])
def test_the_engine_takes_a_name_a_config_or_a_method(good):
    assert EngineConfig(quantization=good).quantization == good


@pytest.mark.parametrize("bad", ["int4", "", 4, True, object(), QuantConfig])
def test_the_engine_refuses_anything_else(bad):
    with pytest.raises(ValueError, match="quantization must be"):
        EngineConfig(quantization=bad)


def test_a_config_says_what_it_is():
    assert QuantConfig("awq").description == "AWQ, 4 bits, asymmetric, groups of 64, head in 8 bits"
    channel = QuantConfig(bits=3, group=-1, symmetric=True, head_bits=None)
    assert channel.description == "RTN, 3 bits, symmetric, per channel, head as it was"
