"""Shared by all tests: a cache of their own, and vector units to run on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

os.environ.setdefault("SPEEDLIGHT_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"speedlight-tests-{os.getuid()}"))

from speedlight.machine import host_isas

FULL = os.environ.get("SPEEDLIGHT_FULL") == "1"


@pytest.fixture(params=[isa.name for isa in host_isas()])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every vector unit that this machine has."""
    monkeypatch.setenv("SPEEDLIGHT_ISA", request.param)
    return request.param


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def default_threads() -> Iterator[None]:
    yield
    import speedlight as sl

    sl.set_threads(None)
