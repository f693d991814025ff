"""The planner: a model on a card, on paper, and the command that prints it."""

import argparse
import dataclasses
import json

import pytest

from minillm.model.presets import preset
from minillm.perf import plan as module
from minillm.perf.hardware import Machine, card
from minillm.perf.plan import add_plan_arguments, plan, read_config, render, run_plan
from minillm.perf.units import GIB

QWEN = preset("qwen3-32b")
H100 = card("h100")
RAW = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def test_qwen3_32b_on_one_h100_has_the_known_floors():
    p = plan(QWEN, H100, batch=1, context=4096)
    assert round(p.ttft_floor, 2) == 0.28 and round(p.ttft_half_mfu, 2) == 0.55
    kv = p.kv_bytes_per_request / H100.bandwidth
    assert round(1e3 * (p.tpot_floor - kv), 1) == 19.1
    assert p.max_concurrency == 6 and p.fits
    assert (p.prefill.bound, p.decode.bound) == ("compute", "bandwidth")
    assert p.tokens_per_second == 1 / p.tpot_floor


def test_two_cards_serve_73_requests():
    assert plan(QWEN, H100, batch=1, context=4096, cards=2).max_concurrency == 73


def test_memory_of_stacked_savings_at_batch_32_and_8k():
    def memory(**bits):
        return plan(QWEN, H100, batch=32, context=8192, **bits).total_bytes

    full = memory()
    assert round(full / 1e9) == 134
    assert round(full / memory(kv_bytes_per_element=1), 2) == 1.34
    assert round(full / memory(bytes_per_weight=0.5), 2) == 1.58
    assert round(full / memory(bytes_per_weight=0.5, kv_bytes_per_element=1), 2) == 2.65


def test_loading_4k_tokens_beats_computing_them_above_1_9_gb_per_second():
    p = plan(QWEN, H100, batch=1, context=4096)
    assert p.kv_bytes_per_request == GIB
    assert round(1e3 * p.kv_bytes_per_request / 50e9, 1) == 21.5
    assert round(p.kv_bytes_per_request / p.ttft_half_mfu / 1e9, 1) == 1.9


@pytest.mark.parametrize("batch", [6, 7])
def test_the_batch_that_just_fits_and_the_next(batch):
    p = plan(QWEN, H100, batch=batch, context=4096)
    assert p.max_concurrency == 6
    assert p.fits == (batch == 6)
    assert p.decode.bound == ("bandwidth" if p.fits else "capacity")


def test_a_bigger_batch_raises_throughput_and_tpot():
    small, large = (plan(QWEN, H100, batch=b, context=512) for b in (1, 16))
    assert large.tokens_per_second > 15 * small.tokens_per_second
    assert large.tpot_floor > small.tpot_floor


def test_the_text_gives_both_units_both_bounds_and_where_numbers_come_from():
    text = render(plan(QWEN, H100, batch=1, context=4096))
    for part in (
        "65.5 GB (61.0 GiB)", "256 KiB", "1.07 GB (1.00 GiB)", "276 ms", "552 ms", "19.4 ms", "6 requests", "ridge 295",
        "compute-bound", "bandwidth-bound", "derived from", "source: NVIDIA H100", "fits", "50% MFU",
    ):
        assert part in text, part
    assert "NOT" not in text and "note" not in text


def test_the_text_warns_of_what_does_not_fit_and_of_too_long_a_context():
    text = render(plan(QWEN, H100, batch=1, context=131_072))
    assert "DOES NOT FIT" in text and "capacity-bound" in text
    assert "131072 tokens exceed the model's 40960 positions" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch .* got 0"),
        ({"context": 2.5}, "context .* got 2.5"),
        ({"cards": -1}, "cards .* got -1"),
        ({"prompt": 4097}, r"prompt \(4097\) must be at most context \(4096\)"),
        ({"prompt": 0}, "prompt .* got 0"),
        ({"usable": 0}, "usable .* got 0"),
        ({"dtype": "float3"}, "dtype must be one of float32.* got 'float3'"),
        ({"bytes_per_weight": -1}, "bytes_per_weight .* got -1"),
        ({"kv_bytes_per_element": float("nan")}, "kv_bytes_per_element .* got nan"),
    ],
)
def test_bad_numbers_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        plan(QWEN, H100, **{"batch": 1, "context": 4096, **options})


def test_a_precision_that_the_card_lacks_is_named():
    with pytest.raises(ValueError, match="no FLOP/s of A100 .* 'float8_e4m3fn'"):
        plan(QWEN, card("a100"), batch=1, context=8, dtype="float8_e4m3fn")


# --- where a config comes from ---


def test_a_config_is_read_from_a_file_a_folder_or_a_preset(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    from_file = read_config(str(tmp_path / "config.json"))
    assert from_file.hidden_size == 24 and from_file.name == str(tmp_path / "config.json")
    assert dataclasses.replace(read_config(str(tmp_path)), name="") == dataclasses.replace(from_file, name="")
    assert read_config("qwen3-32b") is QWEN


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", "null", json.dumps({**RAW, "hidden_size": "big"}), json.dumps({"architectures": ["Mamba"]}), b"\xff"],
)
def test_a_broken_config_is_a_value_error_that_names_what_is_wrong(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError):
        read_config(str(tmp_path))


@pytest.mark.parametrize("source", ["gpt-9", "no/such/folder", "./org/name", "missing.json", "/etc/none", "org/", ""])
def test_what_is_nothing_at_all_is_refused_without_asking_the_hub(monkeypatch, source):
    monkeypatch.setattr(module, "_from_hub", lambda repo: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match="no file, no folder, no preset"):
        read_config(source)


def test_a_folder_without_a_config_says_so(tmp_path):
    with pytest.raises(ValueError, match="has no config.json"):
        read_config(str(tmp_path))


def test_a_hub_id_is_fetched(monkeypatch, tmp_path):
    import huggingface_hub

    (tmp_path / "c.json").write_text(json.dumps(RAW))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, file: str(tmp_path / "c.json"))
    config = read_config("org/name")
    assert config.name == "org/name" and config.vocab_size == 97


def _hub_errors():
    from huggingface_hub import errors

    def bare(kind):  # their constructors want a response of whichever HTTP library the hub's client uses
        return kind.__new__(kind)

    return {
        "offline": (errors.LocalEntryNotFoundError("no network"), r"cannot fetch .* Without a network give a local config.json"),
        "refused": (ConnectionError("refused"), "cannot fetch config.json of org/name"),
        "unknown": (bare(errors.RepositoryNotFoundError), "no public model 'org/name'; presets are"),
        "gated": (bare(errors.GatedRepoError), "gated"),
        "no file": (errors.EntryNotFoundError("x"), "has no config.json"),
    }


@pytest.mark.parametrize("kind", ["offline", "refused", "unknown", "gated", "no file"])
def test_a_hub_that_fails_gives_an_error_with_a_way_out(monkeypatch, kind):
    import huggingface_hub

    error, message = _hub_errors()[kind]

    def fail(repo, file):
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(ValueError, match=message):
        read_config("org/name")


# --- the command ---


def command(*words):
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    return run_plan(parser.parse_args(words))


def test_the_command_prints_the_plan(capsys):
    assert command("qwen3-32b", "--card", "h100", "--batch", "1", "--context", "4096") == 0
    assert capsys.readouterr().out == render(plan(QWEN, H100, batch=1, context=4096)) + "\n"


def test_the_commands_options_reach_the_plan(capsys):
    words = "--card h100 --cards 2 --weight-bits 4 --kv-bits 8 --memory-mib 81559 --usable 0.5 --prompt 100 --dtype float16"
    command("qwen3-32b", *words.split())
    text = capsys.readouterr().out
    for part in ("2 x H100", "0.5 bytes each", "128 KiB", "50 % of 171 GB (159 GiB)", "prompt of 100 tokens", "float16"):
        assert part in text, part


def test_the_card_here_is_this_machine(capsys, monkeypatch):
    mine = Machine("my laptop", 1e10, {"bfloat16": 1e12}, 8e9, "measured here: lab", "lab", 2, 10, ((10, 1e10),), True)
    monkeypatch.setattr(module, "measure_machine", lambda: mine)
    command("smollm2-135m", "--context", "512")
    assert "my laptop" in (text := capsys.readouterr().out) and "measured here: lab" in text


@pytest.mark.parametrize(
    "words",
    [
        ["qwen3-32b", "--card", "h999"], ["nothing", "--card", "h100"], ["qwen3-32b", "--card", "h100", "--batch", "0"],
        ["qwen3-32b", "--card", "h100", "--memory-mib", "-1"], ["qwen3-32b", "--card", "h100", "--weight-bits", "0"],
    ],
)  # fmt: skip
def test_a_mistake_in_the_command_is_a_value_error_and_prints_nothing(words, capsys):
    with pytest.raises(ValueError):
        command(*words)
    assert capsys.readouterr().out == ""
