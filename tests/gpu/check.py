"""`make gpu-check`: the tests of this folder, then the benchmark, each ended when it hangs; together at most eight minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMITS = {"tests": 300, "benchmark": 180}  # seconds


def main() -> int:
    tests = [sys.executable, "-m", "pytest", "-q", "-rs", str(HERE), *sys.argv[1:]]
    for name, command in (("tests", tests), ("benchmark", [sys.executable, str(HERE / "benchmark.py")])):
        try:
            code = subprocess.run(command, cwd=HERE.parents[1], timeout=LIMITS[name]).returncode
        except subprocess.TimeoutExpired:
            print(f"the {name} were ended after {LIMITS[name]} s")
            return 1
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
