"""Right answers that are written in an unusual way must be green."""

from __future__ import annotations

import math

import numpy as np
import torch

from minillm.course.checks import run_checks
from minillm.course.task import find_task


class Slotted:
    """No ``__dict__``, and memory by the keyword form of torch.empty."""

    __slots__ = ("k", "v", "num_slots", "bytes_per_token")

    def __init__(self, config, num_slots, dtype, device):
        shape = (config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
        self.k = torch.empty(size=shape, dtype=dtype, device=device).zero_()
        self.v = torch.empty_like(self.k).zero_()
        self.num_slots = num_slots
        self.bytes_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize

    def write(self, layer, slots, k, v):
        self.k[layer, slots] = k
        self.v[layer, slots] = v

    def read(self, layer, slots):
        return self.k[layer, slots], self.v[layer, slots]


class OnlyTheConstructorIsNew(Slotted):
    def __init__(self, *args):
        super().__init__(*args)


def test_a_store_with_slots_and_one_in_two_classes_are_green():
    for answer in (Slotted, OnlyTheConstructorIsNew):
        report = run_checks(find_task("1.1 core"), answer)
        assert report.green, report


def whole_rows(kind):
    def rows_to_ridge(n_in, n_out, element_bytes, peak, bandwidth):
        slope = 2 * n_in * n_out / peak - element_bytes * (n_in + n_out) / bandwidth
        return None if slope <= 0 else kind(math.floor(element_bytes * n_in * n_out / bandwidth / slope) + 1)

    return rows_to_ridge


def plan_with(kind):
    def plan(config, weight_bytes, memory, context, element_bytes=2, usable=0.9):
        heads = config["num_attention_heads"]
        kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or config["hidden_size"] // heads
        per_token = 2 * config["num_hidden_layers"] * kv_heads * head_dim * element_bytes
        return per_token, kind(max(0, math.floor((usable * memory - weight_bytes) / (context * per_token))))

    return plan


def test_whole_numbers_of_numpy_are_whole_numbers():
    for id, make in (("0.1 stretch", whole_rows), ("0.2 core", plan_with)):
        report = run_checks(find_task(id), make(np.int64))
        assert report.green, report
        for kind in (bool, float):
            assert run_checks(find_task(id), make(kind)).failed == "shape"
