"""Options and skips that hold for every test; the markers are declared in pyproject.toml."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Two busy cores make single examples slow: only a hang is worth a deadline. CI draws the same examples each time.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--network", action="store_true", help="run the tests that need the internet")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with a reason, what this machine cannot run. CI has the model, so there a missing one is a failure."""
    wants_model = [item for item in items if item.get_closest_marker("model")]
    if wants_model and not os.environ.get("CI"):
        from minillm.model.fetch import status

        state, path = status()
        if state != "ok":
            reason = f"the default model is {state} at {path}; fetch it with: python -m minillm.model.fetch"
            skip = pytest.mark.skip(reason=reason)
            for item in wants_model:
                item.add_marker(skip)
    if not config.getoption("--network"):
        skip = pytest.mark.skip(reason="needs the internet; run with --network")
        for item in items:
            if item.get_closest_marker("network"):
                item.add_marker(skip)
