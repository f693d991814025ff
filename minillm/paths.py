"""Where minillm keeps files between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The user's cache folder: $MINILLM_CACHE, else $XDG_CACHE_HOME/minillm, else ~/.cache/minillm. It may not exist yet."""
    own = os.environ.get("MINILLM_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    # The XDG rule: a relative path there is invalid and must be ignored.
    if shared and Path(shared).is_absolute():
        return Path(shared) / "minillm"
    return Path.home() / ".cache" / "minillm"
