"""Data-parallel and sharded training, two processes on this machine: what one process computes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from conftest import FULL, ROOT, SUPPORT
from distributed import STEPS
from test_torch_sdpa import assert_equal


def trained(folder, world, how, patched):
    """What rank 0 saved."""
    folder.mkdir()
    words = [how, "patched" if patched else "plain", str(folder)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SPEEDLIGHT_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(SUPPORT / "distributed.py")]
    started = [
        subprocess.Popen([*command, str(rank), str(world), *words], env=env, stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    try:
        errors = [x.communicate(timeout=300)[1] for x in started]
    finally:
        for x in started:
            x.kill()
    assert [x.returncode for x in started] == [0] * world, errors
    return torch.load(folder / "found", weights_only=False)


@pytest.mark.skipif(not FULL, reason="every process imports PyTorch")
@pytest.mark.parametrize("patched", [True, False])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_train_as_one(tmp_path, how, patched):
    want, got = trained(tmp_path / "one", 1, how, False), trained(tmp_path / "two", 2, how, patched)
    taken, left = got.pop("taken"), got.pop("left")
    assert not left and sum(taken.values()) == (STEPS if patched else 0)
    assert want["losses"][-1] < want["losses"][0]
    for name in want.keys() - {"taken", "left"}:
        assert_equal(got[name], want[name], name)
