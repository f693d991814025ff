"""One engine in a process of its own, spoken to in JSON lines. It may die, hang or babble: the benchmark goes on."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

LAST_WORDS = 300


class WorkerError(RuntimeError):
    """The engine said no to one task; it can be asked again."""


class WorkerLost(RuntimeError):
    """The process has died, hung or stopped making sense; it has been ended."""


class Worker:
    """A running worker. ``ask`` is the only conversation; a lost worker stays lost."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None):
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        try:
            # a session of its own: engines start processes too, and these must end with it
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, encoding="utf-8",
                errors="replace", env={**os.environ, **(env or {})}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._log.close()
            raise WorkerLost(f"cannot start {command[0]}: {error.strerror or error}") from error
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, task: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Send a task and return its answer. WorkerError: the engine refused it. WorkerLost: no answer within timeout seconds, or
        never."""
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise self._lost(f"no answer to {task['task']!r} within {timeout:g} s") from None
        except (OSError, ValueError):
            line = None
        if line is None:
            raise self._lost(f"it ended during {task['task']!r} with {self._ending()}")
        try:
            reply = json.loads(line)
            answer = reply["error"] if "error" in reply else reply["ok"]
        except (ValueError, TypeError, KeyError):
            raise self._lost(f"its answer to {task['task']!r} makes no sense: {line.strip()[:LAST_WORDS]!r}") from None
        if "error" in reply:
            raise WorkerError(str(answer))
        return answer

    def close(self) -> None:
        """End the process and everything it started. Safe to call twice."""
        if self._log.closed:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:  # what was still to be written has no reader any more
                pass
        self._log.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._lines.put(line)
        except ValueError:  # closed under our hands
            pass
        self._lines.put(None)

    def _ending(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "its output closed"
        if code >= 0:
            return f"exit status {code}"
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"

    def _lost(self, reason: str) -> WorkerLost:
        words = self._last_words()
        self.close()
        return WorkerLost(f"{reason}; its last words: {words}" if words else reason)

    def _last_words(self) -> str:
        """The last line of its standard error that says something."""
        if self._log.closed:
            return ""
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return lines[-1][:LAST_WORDS] if lines else ""
