"""Notebooks as plain Python with ``# %%`` cells, so that authors can write and review them in an editor.

    # %% [markdown]
    # # A heading
    # %% tags=["nbval-ignore-output"]
    print(1)
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import nbformat

HEAD = re.compile(r"^# %%(?P<rest>.*)$")
OPTION = re.compile(r"(?P<key>\w+)=(?=[\[{\"\dtfn-])")


def _options(text: str, line: int) -> dict[str, Any]:
    """key=JSON pairs after the marker; a value may hold spaces."""
    found: dict[str, Any] = {}
    decoder, at = json.JSONDecoder(), 0
    while match := OPTION.search(text, at):
        try:
            found[match["key"]], at = decoder.raw_decode(text, match.end())
        except json.JSONDecodeError as error:
            raise ValueError(f"line {line}: {match['key']} must be JSON, got {text[match.end():]!r}") from error
    return found


def to_notebook(text: str, old: Any = None) -> Any:
    """py:percent text → notebook without outputs. A source that ``old`` has keeps its cell id: small diffs."""
    cells: list[tuple[str, dict[str, Any], list[str]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        match = HEAD.match(line)
        if match:
            kind = "markdown" if "[markdown]" in match["rest"] else "code"
            cells.append((kind, _options(match["rest"].replace("[markdown]", ""), number), []))
        elif cells:
            cells[-1][2].append(line)
        elif line.strip() and not line.startswith("#"):
            raise ValueError(f"line {number}: text before the first '# %%' cell: {line!r}")
    known: dict[tuple[str, str], list[str]] = {}
    for cell in old.cells if old is not None else ():
        known.setdefault((cell.cell_type, cell.source), []).append(cell.id)
    made, used = [], {i for ids in known.values() for i in ids}
    for kind, metadata, lines in cells:
        if kind == "markdown":
            lines = [re.sub(r"^# ?", "", line) for line in lines]
        source = "\n".join(lines).strip("\n")
        new = nbformat.v4.new_markdown_cell(source) if kind == "markdown" else nbformat.v4.new_code_cell(source)
        new.metadata = nbformat.from_dict(metadata)
        same = known.get((kind, source))
        new.id = same.pop(0) if same else _fresh_id(kind + source, used)
        made.append(new)
    return nbformat.v4.new_notebook(cells=made)


def _fresh_id(text: str, used: set[str]) -> str:
    """An id that depends only on the cell's text and on how often that text occurred before."""
    salt = 0
    while (made := hashlib.sha256(f"{salt}{text}".encode()).hexdigest()[:8]) in used:
        salt += 1
    used.add(made)
    return made


def from_notebook(notebook: Any) -> str:
    """Notebook → py:percent text. Outputs are not part of it."""
    parts = []
    for cell in notebook.cells:
        head = "# %%" + (" [markdown]" if cell.cell_type == "markdown" else "")
        head += "".join(f" {key}={json.dumps(value)}" for key, value in sorted(cell.metadata.items()))
        lines = cell.source.splitlines()
        if cell.cell_type == "markdown":
            lines = [f"# {line}".rstrip() for line in lines]
        parts.append("\n".join([head, *lines]))
    return "\n\n".join(parts) + "\n"
