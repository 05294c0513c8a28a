"""speedlight.distributed on GPUs (R27): in Triton's interpreter, or on as many GPUs as there are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from conftest import FULL, ROOT, SUPPORT

LAST = "theirs"


def ran(*words):
    """What rank 0 of every world has printed; all processes have ended well."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SPEEDLIGHT_THREADS": "1"}
    env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asks without starting CUDA, which a forked process could not use
    command = [sys.executable, str(SUPPORT / "sharded_gpu.py"), *map(str, words)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout.split("\n")[:-1]


def test_shards_on_gpus():
    """Every way, sharding and kind of mask; what is refused; a cache."""
    worlds = (1, 2, 3) if FULL or torch.cuda.is_available() else (2,)
    assert [x for x in ran("short", *worlds) if x.endswith(LAST)] == [f"{world} {LAST}" for world in worlds]


@pytest.mark.skipif(not FULL, reason="four processes")
def test_mesh_of_two_dimensions():
    assert ran("mesh", 4) == ["4 contiguous", "4 zigzag"]


@pytest.mark.skipif(not FULL, reason="long")
@pytest.mark.parametrize("world", [2, 3])
def test_random_problems(world):
    seed, count = int(os.environ.get("SEED", "0")), int(os.environ.get("COUNT", "40"))
    assert len(ran("everything", seed, count, world)) > count // 2
