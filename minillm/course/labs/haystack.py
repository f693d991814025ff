"""Needles in a haystack: short facts between sentences of prose, and whether a model still finds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from minillm.llm import LLM
from minillm.quant.calibration_text import TEXTS
from minillm.sampling_params import SamplingParams

NAMES = ("Alice", "Bruno", "Clara", "David", "Elena", "Felix", "Greta", "Henry")
CODES = ("4821", "7390", "1556", "9047", "3312", "6284", "2709", "8153")


@dataclass(frozen=True)
class Haystack:
    """Sentences of prose with one "secret code" for each name between them, evenly spread."""

    text: str
    answers: Mapping[str, str]

    @classmethod
    def build(cls, tokenizer: Any, tokens: int, prose: Sequence[str]) -> Haystack:
        """About so many tokens of prose, and the needles."""
        body: list[str] = []
        while len(tokenizer.encode(" ".join(body))) < tokens:
            body.append(prose[len(body) % len(prose)])
        step = len(body) // len(NAMES) + 1
        for i, (name, code) in enumerate(zip(NAMES, CODES, strict=True)):
            body.insert(i * step + step // 2, f"The secret code of {name} is {code}.")
        return cls(" ".join(body), dict(zip(NAMES, CODES, strict=True)))

    def question(self, name: str) -> str:
        return f"{self.text} Question: What is the secret code of {name}? Answer: The secret code of {name} is"

    def found(self, llm: LLM) -> list[bool]:
        """Whether each name's code is in the answer. With a prefix cache the text is computed once."""
        greedy = SamplingParams(max_tokens=5, temperature=0)
        llm.generate([self.text], SamplingParams(max_tokens=1))
        outs = llm.generate([self.question(name) for name in self.answers], greedy)
        return [code in out.text for code, out in zip(self.answers.values(), outs, strict=True)]


def prose() -> list[str]:
    """Sentences of this project's own texts."""
    sentences = [s.strip() + "." for text in TEXTS for s in text.replace("\n", " ").split(". ")]
    return [s for s in sentences if 30 < len(s) < 200]
