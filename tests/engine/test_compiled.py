"""compile=True: the same answers as the eager engine, from a package that is built once and kept."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import pytest
import torch

from minillm import LLM, ModelConfig, SamplingParams, Transformer, identity
from minillm.attention.torch_backend import TorchAttention
from minillm.cache.kv_store import PlainKVStore
from minillm.engine import compiled as module
from minillm.engine.batch import ForwardBatch, Row
from minillm.engine.compiled import KEPT_PACKAGES, CompiledDecode, CompileUnavailable, find_or_build, fingerprint
from minillm.quant.config import QuantConfig
from minillm.quant.group_linear import GroupLinear
from minillm.quant.linear import PlainLinear
from minillm.quant.quantise import quantise_model

CONFIG = ModelConfig(
    vocab_size=31, hidden_size=16, intermediate_size=20, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=4, max_position=64,
    sliding_window=9, qk_norm=True, family="qwen3", name="org/tiny",
)  # fmt: skip
COMPILER = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
PROMPTS = [[7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [3, 3], [4, 9, 2, 0, 1], [30]]


def tiny(dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> Transformer:
    return Transformer.random(dataclasses.replace(CONFIG, **changes), seed=seed, dtype=dtype)


class FourAndEight:
    """Attention in 4 bits in groups of 32, everything else in 8 per channel; a copy for four rows and more."""

    def for_layer(self, name: str) -> GroupLinear:
        return GroupLinear(4, 32, False, 4) if "self_attn" in name else GroupLinear(8, -1, True, 4)


def quantised(dtype: torch.dtype, method: Any = None, **changes: Any) -> Transformer:
    """A model whose shapes torch's packed kernels can serve."""
    shape = {"vocab_size": 48, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_heads": 4, "mlp_bias": True}
    config = dataclasses.replace(CONFIG, **shape, **changes)
    return Transformer.random(config, dtype=dtype, linear_method=method or FourAndEight())


def store_of(model: Transformer) -> PlainKVStore:
    return PlainKVStore.allocate(model.config, 4 * 40, model.dtype)


def tokens(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    return [o.token_ids for o in llm.generate(prompts, GREEDY)]


# --- what is computed: these tests compile, which takes a while ---


@dataclasses.dataclass
class Compiled:
    """A model whose step has been compiled into a cache folder, and what was logged meanwhile."""

    model: Transformer
    eager: LLM
    llm: LLM
    said: list[str]

    def same_tokens(self, prompts: Sequence[Sequence[int]], llm: LLM | None = None) -> None:
        """Both engines say the same, and the compiled step is what computed it."""
        llm = llm or self.llm
        step, calls = llm.engine.runner.compiled, []
        assert step is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step, "run", lambda batch, plan, run=step.run: calls.append(batch.num_rows) or run(batch, plan))
            got = tokens(llm, prompts)
        assert got == tokens(self.eager, prompts)
        assert len(calls) >= GREEDY.max_tokens - 1 and max(calls) >= len(prompts)


@pytest.fixture(scope="module", params=[False, True], ids=["float64", "float32 in 4 and 8 bits"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    if COMPILER is None:
        pytest.skip("compile=True needs a C++ compiler: g++ or clang++")
    model, said = quantised(torch.float32) if request.param else tiny(), list[str]()
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("minillm").addHandler(listener)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINILLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        llm = LLM(model, num_blocks=80, block_size=4, compile=True)
        yield Compiled(model, LLM(model, num_blocks=80, block_size=4), llm, said)
    logging.getLogger("minillm").removeHandler(listener)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_greedy_tokens_are_the_eager_ones_for_any_number_of_rows(compiled: Compiled, rows: int) -> None:
    compiled.same_tokens(PROMPTS[:rows])
    compiled.same_tokens(PROMPTS[-1:] * rows)


@pytest.mark.slow
def test_a_second_engine_finds_the_package_and_mixes_decoding_with_prompts_in_chunks(compiled: Compiled) -> None:
    announced = sum("compiling the decode step" in line for line in compiled.said)
    assert announced == len(compiled.model.traced()) and "compiled in" in compiled.said[-1]
    before = len(compiled.said)
    second = LLM(compiled.model, num_blocks=80, block_size=4, compile=True, max_num_batched_tokens=6, max_num_seqs=3)
    assert not any("compil" in line for line in compiled.said[before:])
    step, sizes = second.engine.runner.compiled, list[int]()
    assert step is not None
    run = step.run
    step.run = lambda batch, plan: sizes.append(batch.num_rows) or run(batch, plan)  # type: ignore[method-assign]
    assert tokens(second, PROMPTS) == tokens(compiled.eager, PROMPTS)
    assert {1, 2, 3} >= set(sizes) and second.meter.snapshot().steps > len(sizes) > 20  # the other steps had prompts in them


@pytest.mark.slow
def test_a_padded_static_batch_may_be_compiled_too(compiled: Compiled) -> None:
    static = LLM(compiled.model, num_blocks=80, block_size=4, compile=True, batching="static")
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (3, 20, 9)]  # rows that end early are padded on
    outputs = [[o.token_ids for o in llm.generate(PROMPTS[:3], params)] for llm in (static, compiled.eager)]
    assert outputs[0] == outputs[1]


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_a_compiled_step_is_replayed_in_fixed_sizes(compiled: Compiled, overlap: bool) -> None:
    llm = LLM(compiled.model, num_blocks=80, block_size=4, compile=True, cuda_graphs=True, overlap=overlap)
    assert tokens(llm, PROMPTS) == tokens(compiled.eager, PROMPTS)
    graphs = llm.engine.runner.graphs
    assert graphs is not None and graphs.fused and graphs.sizes == [(8, 32)] and llm.meter.slots_padded == 3 * 19


LENGTHS = [(1,), (1, 1), (2, 30), (9, 10, 11), (64, 1, 17, 4, 33, 8, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("kv_lens", LENGTHS)
def test_logits_are_the_eager_ones(compiled: Compiled, kv_lens: tuple[int, ...]) -> None:
    step = compiled.llm.engine.runner.compiled
    assert step is not None
    same_logits(compiled.model, step, kv_lens, 1e-12 if compiled.model.dtype == torch.float64 else 1e-5)


def same_logits(model: Transformer, step: CompiledDecode, kv_lens: Sequence[int], tolerance: float) -> None:
    """Both compute the same logits from the same keys and values, and write the same ones."""
    blocks = iter(torch.randperm(80, generator=torch.Generator().manual_seed(1)).add(1).tolist())
    rows = [Row([n % 31], n - 1, [next(blocks) for _ in range(-(-n // 4))]) for n in kv_lens]
    batch = ForwardBatch.build(rows, 4, num_padding=2)
    for kv in step.store.layers:
        kv.normal_(generator=torch.Generator().manual_seed(2))
    kept = [kv.clone() for kv in step.store.layers]
    backend = TorchAttention(model.config.sliding_window)
    with torch.inference_mode():
        expected = model(batch, PlainKVStore(kept), backend, backend.plan(batch, model.dtype))
        logits = step.run(batch, step.plan(batch))
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(step.store.layers, kept, strict=True):  # and the step wrote the same keys and values
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_codes_are_multiplied_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if COMPILER is None:
        pytest.skip("compile=True needs a C++ compiler: g++ or clang++")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    model = quantised(torch.bfloat16, num_layers=1)
    step = LLM(model, num_blocks=80, block_size=4, compile=True).engine.runner.compiled
    assert step is not None
    for kv_lens in LENGTHS:
        same_logits(model, step, kv_lens, 0.06)


@pytest.mark.slow
def test_a_quantised_step_reads_codes_for_few_rows_and_their_copy_for_many(compiled: Compiled) -> None:
    """As the eager one does, since both were told to change at four rows."""
    step, model = compiled.llm.engine.runner.compiled, compiled.model
    assert step is not None
    if model.dtype == torch.float64:
        assert step.weight_bytes == model.weight_bytes() and step.model_for(1) is step.model_for(9)
        assert compiled.llm.engine.description.endswith("tokens each; decode compiled")
        return
    assert compiled.llm.engine.description.endswith("; decode compiled for 1 to 3 rows and 4 on")
    copies = sum(t.nbytes for name, t in model.named_buffers() if name.endswith("dense_copy"))
    plain = Transformer(model.config, model.dense_weights(), PlainLinear())
    assert copies and step.weight_bytes == model.weight_bytes() - copies + plain.weight_bytes()
    assert compiled.llm.meter.weight_bytes_held == model.weight_bytes() + step.weight_bytes
    backend = TorchAttention(9)
    for rows in range(1, 8):
        batch = ForwardBatch.build([Row([1], 3, [1 + i]) for i in range(rows)], 4)
        plan = backend.plan(batch, model.dtype)
        eager, ours = (m.work(batch, backend, plan, fused=True) for m in (model, step.model_for(rows)))
        assert ours == eager, rows


# --- what is kept: the compiler is a stand-in ---


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    return tmp_path / "compiled"


def pretend(model: Transformer, store: PlainKVStore, window: int | None, few: bool, target: Path) -> Path:
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("step.so", b"code " * 1000)
    return target


@pytest.fixture
def built(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Each build that was asked for."""
    targets: list[Path] = []
    monkeypatch.setattr(module, "_build", lambda *args: targets.append(args[-1]) or pretend(*args))
    monkeypatch.setenv("CXX", sys.executable)  # any command that exists
    return targets


def find(model: Transformer) -> Path:
    return find_or_build(model, store_of(model), model.config.sliding_window)


def test_a_package_is_built_once_and_nothing_else_is_left(built: list[Path], folder: Path) -> None:
    model = tiny()
    package = find(model)
    assert find(model) == find(tiny()) == package and len(built) == 1
    assert {p.name for p in folder.iterdir()} == {package.name, f"{package.name}.lock"}
    assert package.name.startswith("org_tiny-")


def test_the_folder_and_the_wait_are_announced(built: list[Path], folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    find(tiny())
    assert "compiling the decode step of org/tiny: a minute or two, once" in caplog.text and str(folder) in caplog.text


def truncate(package: Path) -> None:
    os.truncate(package, package.stat().st_size // 2)


def empty(package: Path) -> None:
    package.write_bytes(b"")


def flip_a_bit(package: Path) -> None:
    content = bytearray(package.read_bytes())
    content[2000] ^= 1
    package.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, empty, flip_a_bit])
def test_a_damaged_package_is_built_again(built: list[Path], folder: Path, damage: Callable[[Path], None]) -> None:
    package = find(tiny())
    sound = package.read_bytes()
    damage(package)
    assert find(tiny()) == package and len(built) == 2 and package.read_bytes() == sound


def test_packages_used_last_are_kept_and_the_rest_removed(built: list[Path], folder: Path) -> None:
    packages = []
    for seed in range(KEPT_PACKAGES):
        packages.append(find(tiny(seed=seed)))
        os.utime(packages[-1], (1000 + seed,) * 2)
    find(tiny(seed=0))  # used again: the oldest is now seed 1
    packages.append(find(tiny(seed=99)))
    assert set(folder.glob("*.pt2")) == {*packages} - {packages[1]} and len(built) == KEPT_PACKAGES + 1


def test_an_interrupted_build_leaves_nothing_and_the_next_one_works(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(model: Transformer, store: PlainKVStore, window: int | None, few: bool, target: Path) -> Path:
        target.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(module, "_build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        find(tiny())
    assert [p.suffix for p in folder.iterdir()] == [".lock"]
    monkeypatch.setattr(module, "_build", pretend)
    assert find(tiny()).is_file()


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import test_compiled as t

def killed(model, store, window, few, target):
    target.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

t.module._build = killed
t.torch.set_num_threads(1)
t.find(t.tiny())
"""


@pytest.mark.slow
def test_a_process_killed_while_building_does_not_harm_the_next(built: list[Path], folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(Path(__file__).parent)], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    (scratch,) = folder.glob("tmp*")
    package = find(tiny())
    assert zipfile.ZipFile(package).testzip() is None and len(built) == 1
    assert scratch.exists()  # it might belong to somebody who is still building
    os.utime(scratch, (time.time() - 2 * 86_400,) * 2)
    find(tiny(seed=1))
    assert not scratch.exists() and package.exists()


def test_two_who_start_at_once_build_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, models = [], [tiny(), tiny()]

    def slowly(*args: Any) -> Path:
        calls.append(args)
        time.sleep(0.3)
        return pretend(*args)

    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(module, "_build", slowly)
    threads = [threading.Thread(target=find, args=[m]) for m in models]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(calls) == 1 and len(list(folder.glob("*.pt2"))) == 1


def test_the_fingerprint_is_of_everything_that_the_code_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def mark(model: Transformer, window: int | None = 9) -> str:
        return fingerprint(model, store_of(model), window)

    marks = [
        mark(tiny()), mark(tiny(seed=1)), mark(tiny(torch.float32)), mark(tiny(num_layers=1)), mark(tiny(norm_eps=1e-3)),
        mark(tiny(), window=None), mark(tiny(tie_embeddings=True)), mark(tiny(qk_norm=False, qkv_bias=True)),
    ]  # fmt: skip
    one_weight = tiny()
    one_weight.embedding[30, 15] += 1e-9
    marks.append(mark(one_weight))
    assert mark(tiny()) == marks[0]
    units = module.has_matrix_units()
    monkeypatch.setattr(module, "has_matrix_units", lambda: not units)
    marks.append(mark(tiny()))
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    marks.append(mark(tiny()))
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    marks.append(mark(tiny()))
    for changed in (*module.SOURCES, module):
        getsource = module.inspect.getsource
        monkeypatch.setattr(module.inspect, "getsource", lambda m, f=getsource, c=changed: f(m) + "#" * (m is c))
        marks.append(mark(tiny()))
    formats = (GroupLinear(4, 32, False), GroupLinear(4, 64, False), GroupLinear(4, 64, True), GroupLinear(8, -1, True))
    codes = [mark(quantised(torch.float32, method).traced()[1]) for method in formats]
    marks += [*codes, fingerprint(tiny(), store_of(tiny()), 9, few=True)]
    assert len(set(marks)) == len(marks)
    forms = quantised(torch.float32, GroupLinear(4, 32, False, dense_from=2)).traced()
    assert mark(forms[1]) == codes[0] and mark(forms[2]) not in marks


class Scaled:
    """A learner's method that torch can trace: the product times a factor."""

    def __init__(self, factor: float):
        self.factor = factor

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
        return {"weight": weight, "bias": bias}

    def apply(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, packed["weight"], packed["bias"]) * self.factor

    def unpack(self, packed: Any) -> torch.Tensor:
        return packed["weight"] * self.factor

    def traced(self, packed: Any) -> Any:
        return {1: (self, packed)}


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("units", [True, False])
def test_products_are_tried_out_on_matrix_units_for_many_rows_and_are_onednns_elsewhere(few, units, monkeypatch):
    monkeypatch.setattr(module, "has_matrix_units", lambda: units)
    assert (module.tuning(few).get("max_autotune_gemm_backends") == "ATEN") is (few or not units)


def test_what_a_linear_method_of_ones_own_computes_is_part_of_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tensors multiplied in another way are another step, also where the class was edited under its name."""

    def mark(method: Any) -> str:
        model = Transformer.random(CONFIG, dtype=torch.float64, linear_method=method).traced()[1]
        return fingerprint(model, store_of(model), 9)

    class Other(Scaled):
        pass

    marks = [mark(Scaled(1.0)), mark(Scaled(2.0)), mark(Other(1.0)), mark(PlainLinear())]
    assert mark(Scaled(1.0)) == marks[0]
    getsource = identity.inspect.getsource
    monkeypatch.setattr(identity.inspect, "getsource", lambda what: getsource(what) + "# edited" * (what is Scaled))
    assert len({*marks, mark(Scaled(1.0))}) == len(marks) + 1


FORMS = [None, {}, (PlainLinear(), {}), {2: (PlainLinear(), {})}, {0: (PlainLinear(), {}), 1: (PlainLinear(), {})}, {1: None},
         {1: (PlainLinear(), None)}, {1: (PlainLinear(), {}), "many": (PlainLinear(), {})}]  # fmt: skip


@pytest.mark.parametrize("forms", FORMS)
def test_a_method_whose_traced_forms_cannot_be_read_is_refused_by_name(forms: Any, built: list[Path]) -> None:
    method = Scaled(1.0)
    method.traced = lambda packed: forms  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="traced of Scaled must return .fewest rows: .* the first for 1 row, got"):
        LLM(Transformer.random(CONFIG, linear_method=method), num_blocks=80, block_size=4, compile=True)
    assert not built


@pytest.mark.parametrize("head_bits, copied", [(None, 3), (8, 3), (8, None)])
def test_steps_that_share_layers_are_all_built_and_counted(
    built: list[Path], monkeypatch: pytest.MonkeyPatch, head_bits: int | None, copied: int | None
) -> None:
    """A head that is not quantised is the same layer in the step of few rows and in that of many."""
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda package: package)
    chosen = QuantConfig("rtn", 4, 32, head_bits=head_bits, dense_from=copied)  # type: ignore[arg-type]
    model = quantise_model(quantised(torch.float32, PlainLinear()), chosen)
    step = CompiledDecode(model.traced(), store_of(model), TorchAttention(9))
    assert len(built) == len({step.model_for(rows) for rows in range(1, 5)}) == (1 if copied is None else 2)
    backend = TorchAttention(9)
    for rows in range(1, 5):
        batch = ForwardBatch.build([Row([1], 3, [1 + i]) for i in range(rows)], 4)
        plan = backend.plan(batch, model.dtype)
        assert step.model_for(rows).work(batch, backend, plan, fused=True) == model.work(batch, backend, plan, fused=True)


# --- where it does not work ---


def falls_back(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """The engine says why, once, and answers all the same."""
    model = tiny()
    llm = LLM(model, num_blocks=80, block_size=4, compile=True)
    assert llm.engine.runner.compiled is None
    (line,) = [r.getMessage() for r in caplog.records if "ignored" in r.getMessage()]
    assert line.startswith("compile=True is ignored: ") and reason in line and "\n" not in line
    assert tokens(llm, PROMPTS) == tokens(LLM(model, num_blocks=80, block_size=4), PROMPTS)


def test_without_a_compiler_the_engine_says_so_and_answers(folder: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(shutil, "which", lambda command: None)
    falls_back(caplog, "no C++ compiler was found; install g++ or clang++")


def test_a_compiler_that_fails_is_as_good_as_none(folder: Path, monkeypatch: Any, caplog: Any) -> None:
    def fails(*args: Any) -> Path:
        raise RuntimeError("omp.h: no such file\nand a page of compiler output")

    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(module, "_build", fails)
    falls_back(caplog, "torch could not compile the step (RuntimeError: omp.h: no such file)")
    assert not list(folder.glob("*.pt2")) and not list(folder.glob("tmp*"))


def test_a_cache_folder_that_cannot_be_made_is_no_reason_to_stop(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "file"))
    falls_back(caplog, "there is no place to keep it")


def test_a_package_that_is_there_needs_no_compiler(built: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    package = find(tiny())
    monkeypatch.setattr(shutil, "which", lambda command: None)
    assert find(tiny()) == package
    with pytest.raises(CompileUnavailable, match="no C"):
        find(tiny(seed=1))


def test_a_model_elsewhere_than_on_the_cpu_is_not_compiled(built: list[Path]) -> None:
    model = tiny().to("meta")
    model.device = torch.device("meta")
    with pytest.raises(CompileUnavailable, match="is on meta"):
        find_or_build(model, store_of(tiny()), None)
    assert not built


class Odd:
    """A learner's linear method, which knows nothing of compiling."""

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
        return {"weight": weight, "bias": bias}

    def apply(self, packed: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, packed["weight"], packed["bias"])

    def unpack(self, packed: Any) -> torch.Tensor:
        return packed["weight"]


@pytest.mark.parametrize(
    "method, reason",
    [(GroupLinear(3, 32, False), "is dequantised tile by tile"), (GroupLinear(4, 16, True), "groups that are multiples of 32"),
     (QuantConfig("rtn", 2, 32), "model.layers.[a-z0-9_.]* is dequantised"), (Odd(), "Odd has no product that torch")],
)  # fmt: skip
def test_weights_that_cannot_be_compiled_are_refused_by_name(method: Any, reason: str, built: list[Path]) -> None:
    model = Transformer.random(dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=64, num_heads=16))
    with pytest.raises(ValueError, match=f"compile=True cannot compile these weights: .*{reason}.*; leave compile=False"):
        LLM(model, quantization=method, num_blocks=80, block_size=4, compile=True)
    assert not built


def test_a_traced_model_shares_what_it_can_and_leaves_the_model_as_it_is() -> None:
    model = quantised(torch.float32)
    before = {name: t.data_ptr() for name, t in model.named_buffers()}
    traced = model.traced()
    assert list(traced) == [1, 4]
    assert {name: t.data_ptr() for name, t in model.named_buffers()} == before
    assert {name: t.data_ptr() for name, t in traced[1].named_buffers()} == {
        name: at for name, at in before.items() if not name.endswith("dense_copy")
    }
    for name, dense in traced[4].dense_weights().items():
        assert torch.equal(dense, model.dense_weights()[name])
    for form in traced.values():
        form.to("meta")
    assert all(not t.is_meta for t in model.buffers()) and model.head.dense()[0].isfinite().all()


class OwnBackend(TorchAttention):
    """A learner's."""


class OwnStore(PlainKVStore):
    """A learner's."""


@pytest.mark.parametrize(
    "options", [{"attention_backend": OwnBackend(9)}, {"kv_store": OwnStore.allocate}], ids=["backend", "store"]
)
def test_a_seam_of_ones_own_cannot_be_compiled(options: dict[str, Any], built: list[Path]) -> None:
    with pytest.raises(ValueError, match="leave attention_backend='auto'"):
        LLM(tiny(), num_blocks=80, block_size=4, compile=True, **options)
    assert not built


def test_only_batches_of_decoding_rows_that_want_their_logits_are_accepted() -> None:
    step = CompiledDecode.__new__(CompiledDecode)
    decoding, chunk = Row([1], 5, [1, 2]), Row([1], 5, [3, 4], wants_logits=False)
    accepted = {
        "decoding": [decoding, decoding], "one": [decoding], "a prompt of one token": [Row([1], 0, [1]), decoding],
    }  # fmt: skip
    refused = {"a prompt": [decoding, Row([1, 2], 0, [3])], "a chunk of one token": [decoding, chunk], "a chunk alone": [chunk]}
    for rows, expected in [*((r, True) for r in accepted.values()), *((r, False) for r in refused.values())]:
        for padding in (0, 2):
            assert step.accepts(ForwardBatch.build(rows, 4, padding)) is expected
