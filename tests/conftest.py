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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A short run leaves a unit out that differs from the best one in the product of bfloat16 alone, but for that."""
    units = host_isas()
    if (
        FULL
        or len(units) < 2
        or (units[0].vector_bytes, units[0].registers) != (units[1].vector_bytes, units[1].registers)
    ):
        return

    def twin(item: pytest.Item) -> bool:
        given = getattr(item, "callspec", None)
        return (
            given is not None and given.params.get("isa") == units[1].name and given.params.get("dtype") != "bfloat16"
        )

    left_out = [x for x in items if twin(x)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [x for x in items if not twin(x)]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def default_threads() -> Iterator[None]:
    yield
    import speedlight as sl

    sl.set_threads(None)
