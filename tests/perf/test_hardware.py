"""Data sheets, and this machine measured once and remembered."""

import dataclasses
import json
import math
import platform

import psutil
import pytest
import torch

from minillm.paths import cache_dir
from minillm.perf import hardware, probes
from minillm.perf.hardware import CARDS, Hardware, card, fast_dtype, measure_machine, resolve_device
from minillm.perf.units import KIB


@pytest.mark.parametrize(("name", "ridge"), [("h100", 295), ("h200", 206), ("h20", 37), ("a100", 153)])
def test_ridges_follow_from_the_data_sheets(name, ridge):
    assert round(card(name).ridge("bfloat16")) == ridge


def test_a_batch_of_one_uses_a_third_of_a_percent_of_an_h100_and_under_three_of_an_h20():
    intensity = 2 / 2  # a multiply-add per 16-bit weight
    assert round(100 * intensity / card("h100").ridge("bfloat16"), 2) == 0.34
    assert round(100 * intensity / card("h20").ridge("bfloat16"), 1) == 2.7


def test_every_card_names_its_source_and_known_dtypes():
    for each in CARDS.values():
        assert each.source
        assert all(isinstance(getattr(torch, dtype), torch.dtype) for dtype in each.flops)
        assert "secondary" in each.source, "a primary source was seen: say so in FACTS as well"


def test_an_unknown_card_lists_the_known_ones():
    assert card("H100") is card("h100")
    with pytest.raises(ValueError, match="no data sheet for 'b200'; there are h100, h200, h20, a100"):
        card("b200")
    with pytest.raises(ValueError, match="no data sheet for 3"):
        card(3)


def test_an_unlisted_precision_names_the_listed_ones():
    with pytest.raises(ValueError, match="no FLOP/s of H100 SXM for 'int4'; it has bfloat16"):
        card("h100").rate("int4")


@pytest.mark.parametrize(
    "change", [{"bandwidth": 0}, {"memory": -1}, {"flops": {}}, {"flops": {"float32": math.nan}}, {"bandwidth": "fast"}]
)
def test_impossible_hardware_is_refused(change):
    with pytest.raises(ValueError):
        dataclasses.replace(card("h100"), **change)


def test_two_cards_have_twice_of_everything_but_the_same_ridge():
    one, two = card("h100"), card("h100").times(2)
    assert (two.bandwidth, two.memory) == (2 * one.bandwidth, 2 * one.memory)
    assert two.ridge("bfloat16") == one.ridge("bfloat16")
    assert one.times(1) == one
    with pytest.raises(ValueError, match="cards .* got 0"):
        one.times(0)


# --- the measured machine ---


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Counts measurements, which are replaced by invented ones; the cache is an empty folder."""
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    count = []

    def curve(sizes, device):
        count.append(device)
        return {size: 1e9 * len(count) for size in sizes}

    monkeypatch.setattr(probes, "bandwidth_curve", curve)
    monkeypatch.setattr(probes, "matmul_rates", lambda dtypes, device: dict.fromkeys(dtypes, 1e12))
    load(monkeypatch, 0)
    return count


def load(monkeypatch, percent):
    """Pretend that other programs use this much of twice as many processors as torch has threads."""
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2 * torch.get_num_threads())
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: percent)


def files(tmp_path):
    return list((tmp_path / "machines").iterdir())


def test_a_machine_is_measured_once_and_then_remembered(measured, tmp_path):
    first = measure_machine("cpu")
    assert measure_machine("cpu") == first
    assert len(measured) == 1
    assert [f.suffix for f in files(tmp_path)] == [".json"]


def test_refresh_measures_again_and_replaces_what_was_known(measured, tmp_path):
    measure_machine("cpu")
    second = measure_machine("cpu", refresh=True)
    assert second.bandwidth == 2e9
    assert measure_machine("cpu") == second
    assert len(files(tmp_path)) == 1


def _with(**change):
    return lambda text: json.dumps({**json.loads(text), **change})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "", lambda text: text[: len(text) // 2], lambda text: "[]", lambda text: "null", lambda text: "{}",
        _with(bandwidth=-1), _with(bandwidth="fast"), _with(curve=5), _with(curve=[[1]]), _with(flops=[1]), _with(extra=1),
        _with(label="another machine"), _with(label=3), _with(threads=0), _with(flops={"float32": None}),
    ],
)  # fmt: skip
def test_a_damaged_memory_is_measured_again_and_repaired(measured, tmp_path, damage):
    measure_machine("cpu")
    (path,) = files(tmp_path)
    path.write_text(damage(path.read_text()))
    again = measure_machine("cpu")
    assert len(measured) == 2
    assert measure_machine("cpu") == again and len(measured) == 2


def test_a_memory_of_binary_rubbish_is_measured_again(measured, tmp_path):
    measure_machine("cpu")
    files(tmp_path)[0].write_bytes(b"\xff\xfe\x00")
    measure_machine("cpu")
    assert len(measured) == 2


def test_another_thread_count_is_another_machine(measured, tmp_path, monkeypatch):
    measure_machine("cpu")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    other = measure_machine("cpu")
    assert other.threads == 7 and "7 threads" in other.label
    assert len(files(tmp_path)) == 2


def test_a_measurement_on_a_busy_machine_says_so_and_serves_until_it_is_free(measured, monkeypatch):
    load(monkeypatch, 90)
    busy = measure_machine("cpu")
    assert not busy.quiet and busy.label.endswith("while other programs were busy")
    assert measure_machine("cpu") == busy and len(measured) == 1
    load(monkeypatch, 5)
    free = measure_machine("cpu")
    assert free.quiet and "busy" not in free.label
    load(monkeypatch, 90)
    assert measure_machine("cpu") == free and len(measured) == 2


@pytest.mark.parametrize(("percent", "quiet"), [(0, True), (59, True), (61, False), (100, False)])
def test_a_machine_is_quiet_while_most_of_the_processors_that_torch_uses_are_idle(measured, monkeypatch, percent, quiet):
    load(monkeypatch, percent)  # of twice the threads: 60 % leaves 0.8 of a processor per thread
    assert measure_machine("cpu").quiet == quiet


def test_patience_ends_the_rounds_but_not_before_the_first(monkeypatch):
    monkeypatch.setattr(probes, "PATIENCE_S", -1)
    assert list(probes._rounds()) == [0]
    monkeypatch.setattr(probes, "PATIENCE_S", 60)
    assert len(list(probes._rounds())) == probes.ROUNDS


def test_an_unwritable_cache_costs_only_the_memory(measured, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "file"))
    assert measure_machine("cpu").bandwidth == 1e9
    assert measure_machine("cpu").bandwidth == 2e9


def test_the_label_says_processor_cores_threads_version_and_date(measured):
    machine = measure_machine("cpu")
    assert f"{torch.get_num_threads()} threads" in machine.label and "cores" in machine.label
    assert f"torch {torch.__version__}" in machine.label
    assert machine.label[-10:-6].isdigit()
    assert machine.source == f"measured here: {machine.label}"
    assert isinstance(machine, Hardware)


def test_bandwidth_is_measured_at_the_size_of_the_default_models_weights(measured):
    machine = measure_machine("cpu")
    assert round(machine.working_set / 1e6) == 269
    sizes = [size for size, _ in machine.curve]
    assert sizes == sorted(sizes) and sizes[0] == 256 * KIB and sizes[-1] == 512 * KIB * KIB
    assert dict(machine.curve)[machine.working_set] == machine.bandwidth
    assert set(machine.flops) == {"float32", "bfloat16", "float16"}


def test_the_summary_gives_bandwidth_flops_and_ridge(measured):
    text = measure_machine("cpu").summary()
    assert "1.00 GB/s" in text and "bfloat16 1.00 TFLOP/s (ridge 1000 FLOP/B)" in text


def test_the_probes_themselves_run_and_give_possible_rates(monkeypatch):
    monkeypatch.setattr(probes, "ROUNDS", 1)
    monkeypatch.setattr(probes, "CPU_SHAPE", (64, 64, 64))
    cpu = torch.device("cpu")
    curve = probes.bandwidth_curve([2**22, 2**18], cpu)
    assert list(curve) == [2**18, 2**22]
    assert all(1e6 < bandwidth < 1e14 for bandwidth in curve.values())
    rates = probes.matmul_rates([torch.float32, torch.bfloat16], cpu)
    assert all(1e6 < rate < 1e15 for rate in rates.values())


def test_a_probe_counts_the_bytes_it_reads(monkeypatch):
    seconds = 0.5

    class Fixed:
        best = seconds

    monkeypatch.setattr(probes, "measure", lambda fn, **_: (fn(), Fixed)[1])
    monkeypatch.setattr(probes, "_parallel_parts", lambda device: (2, 64))
    buffer = torch.ones(64)
    # 128 bytes once; 16 bytes, read four times over by the sum to make 64
    assert probes.read_bandwidth(buffer, 128) == 128 / seconds
    assert probes.read_bandwidth(buffer, 16) == 4 * 16 / seconds


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_is_measured_too(monkeypatch, tmp_path):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    machine = measure_machine("cuda")
    assert machine.bandwidth > 1e11 and machine.rate("float16") > 1e12
    assert machine.name == torch.cuda.get_device_name()


# --- devices, dtypes, folders ---


def test_auto_is_a_device_that_is_there():
    assert resolve_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_device(torch.device("cpu")).type == "cpu"


@pytest.mark.parametrize("device", ["toaster", "meta", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(ValueError, match=device):
        resolve_device(device)


@pytest.mark.parametrize(
    ("avx", "amx", "onednn", "system", "dtype"),
    [
        (True, False, True, "Linux", torch.bfloat16),
        (False, True, True, "Linux", torch.bfloat16),
        (False, False, True, "Linux", torch.float32),
        (True, True, False, "Linux", torch.float32),
        (None, None, True, "Linux", torch.float32),  # queries that this torch does not have
        (True, True, True, "Darwin", torch.float32),
    ],
)
def test_a_cpu_gets_bfloat16_only_where_it_multiplies_it_natively(monkeypatch, avx, amx, onednn, system, dtype):
    for name, value in (("_is_avx512_bf16_supported", avx), ("_is_amx_tile_supported", amx)):
        if value is None:
            monkeypatch.delattr(torch.cpu, name, raising=False)
        else:
            monkeypatch.setattr(torch.cpu, name, lambda value=value: value, raising=False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn, raising=False)
    monkeypatch.setattr(platform, "system", lambda: system)
    assert fast_dtype("cpu") == dtype


def test_the_cache_folder_obeys_our_variable_then_xdg_then_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.setenv("MINILLM_CACHE", "")
    assert cache_dir() == tmp_path / "xdg" / "minillm"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "minillm"
    monkeypatch.setenv("MINILLM_CACHE", "~/there")
    assert cache_dir() == tmp_path / "there"


def test_importing_and_naming_a_card_measures_nothing(measured):
    assert hardware.card("h100") and not measured
