"""Text to token ids and back, and chat messages to a prompt. The `tokenizers` library does the work."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken

from minillm.model.files import read_json

NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A tokenizer with its chat template.

    backend: the `tokenizers` object, taken over; its post-processor adds the begin-of-sequence token where the model wants one.
    named: special tokens by role ("bos_token", "eos_token", ...), which templates may ask for.
    chat_template: Jinja source, or None for a model that was not trained to chat.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, named: Mapping[str, str] | None = None, chat_template: str | None = None,
        eos_token_ids: Iterable[int] = (),
    ):
        # A tokenizer.json may carry the truncation and padding of its training run; an engine must see the whole prompt.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._named = dict(named or {})
        self.chat_template = chat_template
        self.eos_token_ids: Sequence[int] = tuple(dict.fromkeys(eos_token_ids))
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Read tokenizer.json and, where they exist, tokenizer_config.json, special_tokens_map.json and chat_template.jinja.

        A missing tokenizer.json is a FileNotFoundError; a file that cannot be read is a ValueError that names it.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a valid tokenizer file: {error}") from error
        settings = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
        named = {role: text for role in NAMED_SPECIAL_TOKENS if (text := _token_text(settings.get(role)))}
        known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in named.values() if t not in known])
        eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
        return cls(backend, named, _folder_template(folder, settings), () if eos is None else (eos,))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens spelled out in it become their ids; a byte that the vocabulary lacks is left out
        (SmolLM's has none for six control characters).

        add_special_tokens: put a begin-of-sequence token in front if this model was trained with one.
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a string, got {text!r}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"text is not valid Unicode: lone surrogate {text[error.start]!r} at {error.start}") from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of token ids. An id beyond the vocabulary (models pad theirs) gives no text; a negative one is a ValueError."""
        ids = [int(i) for i in ids]
        if any(i < 0 for i in ids):
            raise ValueError(f"token ids must be at least 0, got {min(ids)}")
        return self._backend.decode([i for i in ids if i < self.vocab_size], skip_special_tokens=skip_special)

    def is_special(self, token_id: int) -> bool:
        """Whether an id stands for a control token such as <|im_end|> rather than for text."""
        return token_id in self._special

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a conversation. messages: [{"role": "user", "content": "..."}, ...].

        add_generation_prompt: end with the opening of the assistant's turn. variables: whatever else the template reads,
        for example enable_thinking=False. Malformed messages, a model without a template, and messages that the template
        refuses raise ValueError.
        """
        _check_messages(messages)
        values = {"tools": None, "documents": None, **self._named, **variables}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template cannot render these messages: {error}") from error

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of render_chat's text. The template itself writes the begin-of-sequence token if there is one."""
        return self.encode(self.render_chat(messages, add_generation_prompt, **variables), add_special_tokens=False)

    @cached_property
    def _template(self) -> jinja2.Template:
        if self.chat_template is None:
            raise ValueError("this model has no chat template; use generate with a prompt of your own")
        # Templates come with downloaded models: a sandbox, so that one can neither call into Python nor change the messages.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        try:
            return environment.from_string(self.chat_template)
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template is not valid: {error}") from error


class _GenerationBlock(Extension):
    """{% generation %} marks the assistant's tokens for training; for inference its body is plain text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's own filter escapes for HTML


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise ValueError(f"messages must be a non-empty list of {{'role': ..., 'content': ...}}, got {messages!r}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{i}] must be a dict with 'role' and 'content', got {message!r}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"messages[{i}][{key!r}] must be a string, got {message.get(key)!r}")


def _token_text(token: Any) -> str | None:
    """Configs spell a token as text or as {"content": text, ...}."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
