"""Exercise 1.1 beyond what tests/notebooks proves of every exercise: mine() answers with the learner's store."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from minillm import SamplingParams
from minillm.course.checks import CheckFailed, check
from minillm.course.mine import mine, rooms
from minillm.course.tasks.ex_1_1 import TASKS
from minillm.course.tasks.ex_1_1.broken import BREAK
from minillm.course.tasks.ex_1_1.common import TINY, oracle
from minillm.course.tasks.ex_1_1.core import CORE, Traffic
from minillm.model.transformer import Transformer

from .conftest import written

ANSWER = """import torch


class MyStore:
    def __init__(self, config, num_slots, dtype, device):
        shape = (2, config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
        self.table = torch.zeros(shape, dtype=dtype, device=device)
        self.num_slots = num_slots
        self.bytes_per_token = self.table.nbytes // num_slots

    def write(self, layer, slots, k, v):
        self.table[0, layer, slots] = k
        self.table[1, layer, slots] = v

    def read(self, layer, slots):
        return self.table[0, layer, slots], self.table[1, layer, slots]
"""


def test_mine_answers_with_the_learners_store(store, capsys):
    model, greedy = Transformer.random(TINY), SamplingParams(max_tokens=8, ignore_eos=True)
    options = {"dtype": "float32", "num_blocks": 8, "progress": store, "tasks": TASKS}
    assert rooms(store, TASKS) == {"KV store": "minillm"}
    ours = mine(model, **options)
    check(CORE, written(ANSWER, "MyStore"), progress=store)
    assert "Your MyStore is now the KV store of mine()." in capsys.readouterr().out
    theirs = mine(model, **options)
    assert "KV store: yours (1.1 core, MyStore)" in capsys.readouterr().out
    assert type(theirs.engine.store).__name__ == "MyStore" and type(ours.engine.store).__name__ == "PlainKVStore"
    calls = []
    kind = type(theirs.engine.store)
    write = kind.write
    kind.write = lambda self, layer, *rest: (calls.append(layer), write(self, layer, *rest))[1]
    prompt = [5, 3, 8, 1]
    assert theirs.generate(prompt, greedy)[0].token_ids == ours.generate(prompt, greedy)[0].token_ids
    assert calls == list(range(TINY.num_layers)) * 8, "one write a layer and step, all of them the learner's"


def test_a_wrong_store_is_not_kept(store):
    swapped = ANSWER.replace("slots], self.table[1, layer, slots]", "slots],")
    with pytest.raises(CheckFailed, match="read gives a pair"):
        check(CORE, written(swapped, "MyStore"), progress=store)
    assert rooms(store, TASKS) == {"KV store": "minillm"}


def test_traffic_counts_what_is_written_and_not_what_is_viewed():
    table, row = torch.zeros(100, 4), torch.ones(1, 4)
    with Traffic() as traffic:
        table[3:5].view(-1)
    assert (traffic.bytes, traffic.operators) == (0, 0)
    with Traffic() as traffic:
        table[torch.tensor([7])] = row
    assert row.nbytes <= traffic.bytes <= 2 * row.nbytes and traffic.operators <= 2
    with Traffic() as traffic:
        table.index_copy_(0, torch.tensor([7]), row)
    assert row.nbytes <= traffic.bytes <= 2 * row.nbytes
    with Traffic() as traffic:
        torch.cat([table, row])
    assert traffic.bytes == 101 * row.nbytes


def test_the_oracle_is_attention():
    """The reference of the random checks against torch, where all is visible."""
    q, k, v = torch.randn(6, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    heads_first = [x.transpose(0, 1) for x in (q[None], k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, enable_gqa=True)[:, 0]
    torch.testing.assert_close(oracle(q, k, v), expected, rtol=1e-5, atol=1e-5)


def test_the_shipped_fault_is_right_for_prompts_and_red_at_the_first_decoded_token():
    from minillm.course.checks import run_checks

    def shipped(q, k, v, past_k, past_v):
        all_k, all_v = torch.cat([past_k, k]), torch.cat([past_v, v])
        heads_first = [x.transpose(0, 1) for x in (q, all_k, all_v)]
        out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return out.transpose(0, 1), all_k, all_v

    report = run_checks(BREAK, shipped)
    assert report.failed == "random: then one token at a time" and "random: a prompt at once" in report.passed


def test_every_named_check_but_the_plain_ones_has_a_wrong_answer():
    path = Path(__file__).parents[1] / "notebooks" / "wrong" / "ex_1_1.py"
    spec = importlib.util.spec_from_file_location("wrong_ex_1_1", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for task in TASKS:
        kinds = {red.split(":")[0] for _, red in module.WRONG[task.id]}
        assert len(module.WRONG[task.id]) >= 3 and len(kinds) >= 3, f"{task.id}: {kinds}"
