"""LLM: the door. Loads a model, feeds the engine, hands back text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Sequence, Union

import torch

from minillm.config import DTYPES, EngineConfig
from minillm.engine.admission import TokenizerLike
from minillm.engine.engine import Engine
from minillm.engine.request import RequestOutput
from minillm.model.loader import load_checkpoint
from minillm.model.tokenizer import Tokenizer
from minillm.model.transformer import Transformer
from minillm.perf.hardware import fast_dtype, resolve_device
from minillm.perf.meter import Meter
from minillm.quant.awq_checkpoint import is_awq_folder, load_awq
from minillm.quant.config import as_config
from minillm.quant.quantise import quantise_model
from minillm.sampling_params import SamplingParams

Message = Mapping[str, str]
Prompt = Union[str, Sequence[int], Sequence[Message]]


class LLM:
    """A model that answers.

    model: "smollm2-135m" (fetched once), a folder with safetensors and config.json, a .gguf file, a hub id, or a Transformer.
    options: fields of EngineConfig by keyword; an unknown one is a ValueError. A Transformer given here is never changed.
    """

    def __init__(
        self, model: str | Path | Transformer = "smollm2-135m", *, tokenizer: TokenizerLike | None = None, **options: Any
    ):
        config = EngineConfig.from_options(**options)
        device = resolve_device(config.device)
        quant = as_config(config.quantization)
        method = None if quant else config.quantization
        if isinstance(model, Transformer):
            dtype = model.dtype if config.dtype == "auto" else DTYPES[config.dtype]
            device = model.device if config.device == "auto" else device
            same = dtype == model.dtype and device == model.device and method is None
            transformer = model if same or quant else model.converted(dtype, device, method)
            self.note = ""
        elif is_awq_folder(model):
            if config.quantization is not None:
                raise ValueError(f"{model} is quantised already: leave quantization=None, got {config.quantization!r:.60}")
            dtype = fast_dtype(device) if config.dtype == "auto" else DTYPES[config.dtype]
            transformer = load_awq(model, dtype, device)
            folder = Path(model).expanduser()
            tokenizer = tokenizer or (Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None)
            self.note = transformer.storage
        else:
            checkpoint = load_checkpoint(model)
            dtype = fast_dtype(device) if config.dtype == "auto" else DTYPES[config.dtype]
            stored = torch.float32 if quant else dtype  # what is to be quantised is not rounded before
            transformer = Transformer.from_weights(checkpoint.config, checkpoint.weights, stored, device, method)
            tokenizer = tokenizer or checkpoint.tokenizer
            self.note = checkpoint.note
        if quant:
            transformer = quantise_model(transformer, quant, tokenizer, dtype, device)
        self.tokenizer = tokenizer
        self.engine = Engine(transformer, tokenizer, config)

    @property
    def meter(self) -> Meter:
        """The six needles since the last ``meter.reset()``."""
        return self.engine.meter

    @property
    def model(self) -> Transformer:
        return self.engine.model

    def __repr__(self) -> str:
        return f"<LLM {self.engine.description}>"

    def generate(
        self, prompts: str | Sequence[int] | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Complete one prompt or several; results in input order, n per prompt where its params say n.

        prompts: text, a sequence of token ids, or a sequence of these. params: one for all, or one for each.
        Every prompt is checked before the first is run: a ValueError changes nothing.
        """
        return self._run(self._pair(_as_list(prompts), params))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of {"role": …, "content": …}, or several; one result for each, in order."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise ValueError(f"messages must be a list of at least one {{'role': ..., 'content': ...}}, got {messages!r:.60}")
        conversations = [messages] if isinstance(messages[0], Mapping) else list(messages)
        bad = [c for c in conversations if not _is_conversation(c)]
        if bad:
            raise ValueError(f"a conversation is a list of {{'role': ..., 'content': ...}}, got {bad[0]!r:.60}")
        return self._run(self._pair(conversations, params))  # type: ignore[arg-type]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Any]:
        """Yield the answer to one prompt or conversation as it grows: pieces of text, or token ids without a tokenizer.

        Leaving the loop early aborts the request.
        """
        if params is not None and getattr(params, "n", 1) != 1:
            raise ValueError(f"a stream is one sample, got n={params.n}")
        ((ids, p),) = self._pair([prompt], params)
        return self._stream(ids, p)

    def _stream(self, ids: list[int], params: SamplingParams) -> Iterator[Any]:
        name = self.engine.add_request(ids, params)
        seen = 0
        try:
            finished = False
            while not finished and self.engine.knows(name):  # somebody else may have aborted it
                for output in self._steps({name}):
                    finished = output.finished
                    if self.tokenizer is None:
                        yield from output.token_ids[seen:]
                        seen = len(output.token_ids)
                    elif output.delta:
                        yield output.delta
        finally:
            self.engine.abort(name)

    def _steps(self, mine: set[str]) -> list[RequestOutput]:
        """One step; outputs of other callers' requests are handed back to the engine."""
        outputs = self.engine.step()
        self.engine.hold([o for o in outputs if o.request_id not in mine])
        return [o for o in outputs if o.request_id in mine]

    def _run(self, work: list[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
        names: list[str] = []
        results: dict[str, RequestOutput] = {}
        unfinished: set[str] = set()
        foreign: list[RequestOutput] = []
        try:
            for ids, params in work:
                first = None
                for sample in params.samples():
                    names.append(self.engine.add_request(ids, sample, sibling=first))
                    unfinished.add(names[-1])
                    first = first or names[-1]
            while unfinished:
                gone = next((name for name in unfinished if not self.engine.knows(name)), None)
                if gone is not None:
                    raise RuntimeError(f"request {gone!r} was aborted from elsewhere while generate waited for it")
                for output in self.engine.step():
                    if output.request_id not in unfinished:
                        foreign.append(output)
                    elif output.finished:
                        results[output.request_id] = output
                        unfinished.remove(output.request_id)
        finally:  # an interrupt must not leave requests behind, nor lose what belongs to other callers
            for name in unfinished:
                self.engine.abort(name)
            self.engine.hold(foreign)
        return [results[name] for name in names]

    def _pair(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[tuple[list[int], SamplingParams]]:
        """Token ids and parameters of every prompt, all of them checked."""
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(prompts)
        elif isinstance(params, Iterable):
            each = list(params)
        else:
            raise ValueError(f"params must be SamplingParams, or one for each prompt, got {params!r:.60}")
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts with {len(each)} sampling params; give one for all or one for each")
        pairs = [(self.encode(prompt), p) for prompt, p in zip(prompts, each, strict=True)]
        for ids, p in pairs:
            self.engine.admission.check(ids, p)
        return pairs

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, or of a conversation in the model's chat template."""
        if _is_conversation(prompt):
            template = getattr(self.tokenizer, "apply_chat_template", None)
            if template is None:
                raise ValueError("this model has no chat template; give text or token ids")
            return list(template(list(prompt), add_generation_prompt=True))
        return self.engine.encode(prompt)  # type: ignore[arg-type]


def _is_conversation(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _as_list(prompts: str | Sequence[int] | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]  # what is no prompt is refused like one among many
    try:
        items = list(prompts)
    except TypeError:  # an array without dimensions says it can be iterated, and cannot
        return [prompts]  # type: ignore[list-item]
    if items and all(hasattr(t, "__index__") and getattr(t, "ndim", 0) == 0 for t in items):  # arrays have __index__ too
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]
