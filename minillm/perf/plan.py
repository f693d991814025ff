"""Will it fit, and how fast can it be? Memory, KV, TTFT and TPOT floors and concurrency of any config on any card, on paper."""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from minillm.checking import check_positive, check_share, check_whole
from minillm.model.config import ModelConfig
from minillm.model.presets import PRESETS
from minillm.perf import units
from minillm.perf.hardware import CARDS, Hardware, card, measure_machine
from minillm.perf.roofline import Prediction, capacity, decode_work, predict, prefill_work
from minillm.perf.units import format_bytes, format_count, format_rate, format_time

BYTES_OF = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8_e4m3fn": 1.0, "int8": 1.0}
HALF_MFU = 0.5  # model FLOPs utilisation of a well-tuned prefill, the usual rule of thumb


@dataclass(frozen=True)
class Plan:
    """A model on some cards, derived from shapes and peaks alone. Bytes, seconds and counts; see `plan` for the inputs.

    prefill is for one prompt alone, decode for one step of the whole batch; their seconds are floors.
    """

    config: ModelConfig
    hardware: Hardware
    batch: int
    context: int
    prompt: int
    dtype: str
    bytes_per_weight: float
    kv_bytes_per_element: float
    usable: float
    weight_bytes: float
    kv_bytes_per_token: float
    max_concurrency: int
    prefill: Prediction
    decode: Prediction

    @property
    def kv_bytes_per_request(self) -> float:
        return self.context * self.kv_bytes_per_token

    @property
    def total_bytes(self) -> float:
        """Weights and the KV of the whole batch."""
        return self.weight_bytes + self.batch * self.kv_bytes_per_request

    @property
    def usable_bytes(self) -> float:
        return self.usable * self.hardware.memory

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.usable_bytes

    @property
    def ttft_floor(self) -> float:
        """Seconds to the first token of one prompt at full peaks."""
        return self.prefill.seconds

    @property
    def ttft_half_mfu(self) -> float:
        """The same when the arithmetic units reach half of their peak."""
        return max(self.prefill.compute_s / HALF_MFU, self.prefill.memory_s)

    @property
    def tpot_floor(self) -> float:
        """Seconds per output token of each request."""
        return self.decode.seconds

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of the whole batch per second, at most."""
        return self.batch / self.tpot_floor


def plan(
    config: ModelConfig, hardware: Hardware, *, batch: int, context: int, dtype: str = "bfloat16",
    bytes_per_weight: float | None = None, kv_bytes_per_element: float | None = None, cards: int = 1, usable: float = 0.9,
    prompt: int | None = None,
) -> Plan:
    """Plan `batch` requests of `context` tokens each (prompt and output together) on `cards` devices.

    dtype: precision of the arithmetic; weights and KV elements take its size unless said. bytes_per_weight: an average
    over all weights, 0.5 for 4 bits. usable: share of the memory that may be filled. prompt: tokens of one prefill, the
    whole context unless said. Several cards share everything evenly and talk for free. Bad numbers raise ValueError.
    """
    for name, count in (("batch", batch), ("context", context), ("cards", cards)):
        check_whole(name, count)
    prompt = context if prompt is None else prompt
    check_whole("prompt", prompt)
    if prompt > context:
        raise ValueError(f"prompt ({prompt}) must be at most context ({context}), which counts prompt and output tokens")
    check_share("usable", usable)
    if dtype not in BYTES_OF:
        raise ValueError(f"dtype must be one of {', '.join(BYTES_OF)}, got {dtype!r}")
    bytes_per_weight = BYTES_OF[dtype] if bytes_per_weight is None else bytes_per_weight
    kv_bytes_per_element = BYTES_OF[dtype] if kv_bytes_per_element is None else kv_bytes_per_element
    check_positive("bytes_per_weight", bytes_per_weight)
    check_positive("kv_bytes_per_element", kv_bytes_per_element)
    hardware = hardware.times(cards)
    weight_bytes = config.num_params * bytes_per_weight
    per_token = config.kv_bytes_per_token(kv_bytes_per_element)
    decode = decode_work(
        config, batch, context, dtype=dtype, bytes_per_weight=bytes_per_weight, kv_bytes_per_element=kv_bytes_per_element
    )
    prefill = prefill_work(
        config, prompt, dtype=dtype, bytes_per_weight=bytes_per_weight, kv_bytes_per_element=kv_bytes_per_element
    )
    return Plan(
        config, hardware, batch, context, prompt, dtype, bytes_per_weight, kv_bytes_per_element, usable, weight_bytes, per_token,
        capacity(
            config, hardware, weight_bytes=weight_bytes, context=context, kv_bytes_per_element=kv_bytes_per_element, usable=usable
        ),
        predict(prefill, hardware, held_bytes=weight_bytes + prompt * per_token, usable=usable),
        predict(decode, hardware, held_bytes=weight_bytes + batch * context * per_token, usable=usable),
    )


def render(p: Plan) -> str:
    """The plan as text. Derived numbers come from shapes and peaks by formula; the card's own are recorded or measured."""
    hw = p.hardware
    need = "fits" if p.fits else "DOES NOT FIT"
    rows = [
        ("derived from the model's shape", ""),
        ("parameters", f"{format_count(p.config.num_params / 1e6)} million"),
        ("weights", f"{format_bytes(p.weight_bytes)}, {p.bytes_per_weight:g} bytes each"),
        ("KV per token", f"{p.kv_bytes_per_token / units.KIB:g} KiB, {p.kv_bytes_per_element:g} bytes per element"),
        ("KV per request", f"{format_bytes(p.kv_bytes_per_request)} for {p.context} tokens"),
        (f"memory for batch {p.batch}", f"{format_bytes(p.total_bytes)}: {need}"),
        ("derived from shape and card: floors at full peaks", ""),
        ("usable memory", f"{format_bytes(p.usable_bytes)}, {100 * p.usable:g} % of {format_bytes(hw.memory)}"),
        ("max concurrency", f"{p.max_concurrency} requests of {p.context} tokens"),
        ("TTFT", f"{format_time(p.ttft_floor)} for a prompt of {p.prompt} tokens alone"),
        (f"TTFT at {HALF_MFU:.0%} MFU", format_time(p.ttft_half_mfu)),
        ("prefill", p.prefill.verdict()),
        ("TPOT", f"{format_time(p.tpot_floor)}, {format_count(p.tokens_per_second)} tok/s for the batch"),
        ("decode", p.decode.verdict()),
    ]
    if not p.fits:
        rows.append(("note", "times are those of enough memory; as planned, it does not run"))
    if p.context > p.config.max_position:
        rows.append(("note", f"{p.context} tokens exceed the model's {p.config.max_position} positions"))
    head = [
        f"{p.config.name} on {hw.name}: batch {p.batch}, context {p.context}, {p.dtype}",
        f"  card: {format_rate(hw.bandwidth, 'B/s')}, {format_rate(hw.rate(p.dtype), 'FLOP/s')} {p.dtype}, "
        f"ridge {hw.ridge(p.dtype):.0f} FLOP/B",
        f"  source: {hw.source}",
    ]
    width = max(len(name) for name, text in rows if text)
    return "\n".join(head + [f"  {name:<{width}}  {text}" if text else name for name, text in rows])


def read_config(source: str) -> ModelConfig:
    """The config named by a preset, a config.json, a folder that holds one, or a hub id; ValueError says what is wrong."""
    if source in PRESETS:
        return PRESETS[source]
    path = Path(source).expanduser()
    if source and path.is_dir():  # an empty name would mean the current folder
        path = path / "config.json"
        if not path.is_file():
            raise ValueError(f"the folder {source} has no config.json")
    if path.is_file():
        return _from_file(path, source)
    if source.count("/") != 1 or source.startswith((".", "/", "~")) or source.endswith((".json", "/")):
        known = ", ".join(PRESETS)
        raise ValueError(f"{source!r} is no file, no folder, no preset ({known}) and no hub id such as Qwen/Qwen3-32B")
    return _from_file(_from_hub(source), source)


def _from_hub(repo: str) -> Path:
    from huggingface_hub import hf_hub_download  # slow to import, and only hub ids need it
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(hf_hub_download(repo, "config.json"))
    except GatedRepoError:
        raise ValueError(f"{repo} is gated: accept its licence on the hub and log in, or give a local config.json") from None
    except RepositoryNotFoundError:
        raise ValueError(f"the hub has no public model {repo!r}; presets are {', '.join(PRESETS)}") from None
    except (LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"cannot fetch config.json of {repo} ({type(error).__name__}). Without a network give a local config.json, "
            f"a model folder or a preset ({', '.join(PRESETS)})"
        ) from None
    except EntryNotFoundError:
        raise ValueError(f"{repo} on the hub has no config.json") from None


def _from_file(path: Path, name: str) -> ModelConfig:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(raw).__name__}")
    try:
        return ModelConfig.from_hf(raw, name)
    except TypeError as error:
        raise ValueError(f"{path} has a value of a wrong type: {error}") from None


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that `run_plan` reads."""
    parser.add_argument("config", help=f"preset ({', '.join(PRESETS)}), config.json, model folder or hub id")
    parser.add_argument("--card", default="here", help=f"{', '.join(CARDS)}, or here: this machine, measured (default)")
    parser.add_argument("--cards", type=int, default=1, help="how many of them (default 1)")
    parser.add_argument("--batch", type=int, default=1, help="requests at once (default 1)")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each, prompt and output (default 4096)")
    parser.add_argument("--prompt", type=int, help="tokens of the prompt (default: the whole context)")
    parser.add_argument("--dtype", default="bfloat16", choices=list(BYTES_OF), help="precision of arithmetic (default bfloat16)")
    parser.add_argument("--weight-bits", type=float, help="average bits per weight (default: those of dtype)")
    parser.add_argument("--kv-bits", type=float, help="bits per element of the KV cache (default: those of dtype)")
    parser.add_argument("--usable", type=float, default=0.9, help="share of the memory to fill (default 0.9)")
    parser.add_argument("--memory-mib", type=float, help="memory of a card as its driver reports it (default: data sheet)")


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan that parsed arguments ask for; returns exit code 0. A mistake in them raises ValueError."""
    config = read_config(args.config)
    hardware: Hardware = measure_machine() if args.card == "here" else card(args.card)
    if args.memory_mib is not None:
        check_positive("memory-mib", args.memory_mib)
        hardware = dataclasses.replace(hardware, memory=args.memory_mib * units.MIB)
    made = plan(
        config, hardware, batch=args.batch, context=args.context, dtype=args.dtype,
        bytes_per_weight=None if args.weight_bits is None else args.weight_bits / 8,
        kv_bytes_per_element=None if args.kv_bits is None else args.kv_bits / 8,
        cards=args.cards, usable=args.usable, prompt=args.prompt,
    )
    print(render(made))
    return 0
