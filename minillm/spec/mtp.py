"""Multi-token prediction: a small head on the model's own hidden state that guesses what comes after the next token."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from minillm.engine.request import Request
from minillm.engine.sampler import most_likely
from minillm.model.transformer import Transformer
from minillm.perf.work import Work
from minillm.quant.linear import Linear, default_method
from minillm.spec.draft import Draft

HEADS = Path(__file__).parent / "heads"
"""Trained heads that come with the package: one file per model, named like it."""


class MTPHead(nn.Module):
    """From the state that gave token t + 1, and that token, the state that gives token t + 2; applied to its own answer, t + 3 …

    As in DeepSeek-V3's MTP module (arXiv 2412.19437) without attention: state and token embedding are normed, joined and
    projected, then an MLP follows. The tokens come from the model's own output matrix, cut to the ``vocab`` most frequent ones
    (Zhao et al. 2025, FR-Spec, arXiv 2502.14856): reading all of it would cost a fifth of a step of a small model.
    """

    def __init__(self, hidden: int, intermediate: int, vocab: Tensor):
        """vocab: [n] int64, the token ids that can be guessed."""
        super().__init__()
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)
        self.register_buffer("vocab", vocab)
        nn.init.zeros_(self.join.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, state: Tensor, embedded: Tensor) -> Tensor:
        """state, embedded [n, hidden] → the next state [n, hidden]."""
        size = state.shape[-1:]
        x = state + self.join(torch.cat([F.rms_norm(state, size), F.rms_norm(embedded, size)], dim=-1))
        gate, up = self.gate_up(F.rms_norm(x, size)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

    def save(self, path: Path, about: dict[str, str]) -> None:
        """Write the weights in 16 bit; about: how they were made."""
        tensors = {name: t.detach().to(torch.bfloat16).contiguous() for name, t in self.named_parameters()}
        vocab = self.get_buffer("vocab").to(torch.int32)
        save_file({**tensors, "vocab": vocab}, path, metadata={**about, "what": "minillm MTP head"})

    @classmethod
    def load(cls, path: Path, dtype: torch.dtype = torch.float32) -> "MTPHead":
        """ValueError for a file that is no head of this kind."""
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}
            vocab = tensors["vocab"]
            if vocab.dim() != 1 or vocab.is_floating_point() or vocab.dtype == torch.bool:
                kind = str(vocab.dtype).removeprefix("torch.")
                raise ValueError(f"vocab is a list of whole numbers, got {kind} {list(vocab.shape)}")
            bad = next((name for name, t in tensors.items() if not torch.isfinite(t).all()), None)
            if bad is not None:
                raise ValueError(f"{bad} holds a number that is not finite")
            hidden, intermediate = tensors["down.weight"].shape
            head = cls(hidden, intermediate, tensors.pop("vocab").long())
            head.load_state_dict({**tensors, "vocab": head.get_buffer("vocab")})
        except (OSError, KeyError, RuntimeError, ValueError, SafetensorError) as error:
            raise ValueError(f"{path} holds no MTP head: {error}") from error
        return head.to(dtype).eval()


class MTPProposer:
    """Drafts with an MTP head. The engine shows it the states of every pass (``observe``), which is all that it needs to know."""

    wants_hidden = True

    def __init__(self, head: MTPHead, model: Transformer):
        """ValueError for a head of another model's shape. The head stays as it is."""
        size, words = model.config.hidden_size, model.config.vocab_size
        if head.down.out_features != size:
            raise ValueError(f"the MTP head is made for states of {head.down.out_features}, the model's have {size}")
        vocab = head.get_buffer("vocab")
        if not len(vocab) or not 0 <= int(vocab.min()) <= int(vocab.max()) < words:
            raise ValueError(f"the MTP head guesses tokens {vocab.tolist()!r:.40}, the model's are 0 to {words - 1}")
        self.vocab = vocab.to(model.device)
        self.embedding = model.embedding
        self.head = _packed(head, model)
        self.output = _linear(model.head.dense()[0][self.vocab], model)  # hidden → the tokens that can be guessed
        self._linears = [m for m in (*self.head.modules(), self.output) if isinstance(m, Linear)]
        self.weight_bytes = sum(linear.nbytes() for linear in self._linears)
        self.price = self.weight_bytes / (model.config.matmul_params * model.dtype.itemsize)
        self._states: dict[str, Tensor] = {}
        self._work = Work()

    def observe(self, requests: Sequence[Request], states: Tensor) -> None:
        """states: [requests, hidden], those that gave each request's last token."""
        for request, state in zip(requests, states, strict=True):
            self._states[request.request_id] = state

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._states.pop(request_id, None)

    def take_work(self) -> Work:
        """What the head has done since this was called last."""
        work, self._work = self._work, Work()
        return work

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Draft]:
        drafts: dict[str, list[int]] = {r.request_id: [] for r in requests}
        active = [(r, n) for r, n in zip(requests, lengths, strict=True) if n > 0 and r.request_id in self._states]
        if not active:
            return [Draft() for _ in requests]
        state = torch.stack([self._states[r.request_id] for r, _ in active])
        token = torch.tensor([r.token_ids[-1] for r, _ in active], device=state.device)
        for step in range(max(n for _, n in active)):
            state = self.head(state, self.embedding[token])
            token = self.vocab[torch.tensor(most_likely(self.output(state)), device=state.device)]
            self._work += self.work(len(active))
            for (request, n), t in zip(active, token.tolist(), strict=True):
                if step < n:
                    drafts[request.request_id].append(t)
        return [Draft(tuple(drafts[r.request_id])) for r in requests]

    def work(self, rows: int) -> Work:
        """One token of each of these rows: the head's weights and the cut output matrix are read once."""
        element, size = self.output.dtype.itemsize, self.output.in_features
        small = Work(activation_bytes=rows * (8 * size + 3 * self.head.down.in_features) * element, launches=6)
        return sum((linear.work(rows) for linear in self._linears), small)


def _linear(weight: Tensor, model: Transformer) -> Linear:
    return Linear(weight.to(model.device, model.dtype), None, default_method(model.dtype, model.device))


def _packed(head: MTPHead, model: Transformer) -> MTPHead:
    """The head in the model's dtype, its weights laid out like the model's."""
    packed = MTPHead(head.down.out_features, head.down.in_features, head.get_buffer("vocab"))
    for name in ("join", "gate_up", "down"):
        setattr(packed, name, _linear(getattr(head, name).weight.detach(), model))
    return packed.eval()
