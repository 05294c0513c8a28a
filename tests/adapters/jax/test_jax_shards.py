"""speedlight.jax in and around shard_map: what jax.nn computes on several devices, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import sharded_jax
from test_jax import HAS_RESIDUAL, SMALL, close

RELEASE = jax.__version_info__
# what raises here and in jax.nn, beside the cases that both refuse
MISSING = {
    "automatic axis and gspmd": ("UnsupportedError", None),
    "residual of varying values": ("ValueError", None),  # docs/jax.md
}
if not hasattr(jax, "set_mesh"):
    MISSING["explicit axes"] = ("AttributeError", "AttributeError")
if not HAS_RESIDUAL:
    MISSING |= {"residual alone": (None, "TypeError"), "residual of varying values": ("ValueError", "TypeError")}
if RELEASE < (0, 7):
    MISSING["automatic axis"] = ("UnsupportedError", None)


@pytest.mark.skipif(RELEASE < (0, 6, 1), reason="jax.nn has no gradients in shard_map here")
def test_as_jax_in_shard_map(tmp_path):
    """Gradients inside and around, shared arrays, scan, cond, checkpoint, vmap; what is not shared is not taken so."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    path = tmp_path / "results.npz"
    done = subprocess.run(
        [sys.executable, str(Path(sharded_jax.__file__)), str(path)],
        capture_output=True, text=True, timeout=240, env=os.environ | {"XLA_FLAGS": flags},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    raised, arrays = json.loads(done.stdout), np.load(path)
    assert list(raised) == list(sharded_jax.CASES)
    for name, errors in raised.items():
        kinds = tuple(error and error.split(":")[0] for error in errors)
        refused = ("ValueError", "ValueError") if name.startswith("refused") else (None, None)
        assert kinds == MISSING.get(name, refused), (name, errors)
        if kinds != (None, None):
            continue
        prefix, other = f"{name}/ours/", f"{sharded_jax.ALIKE.get(name, name)}/theirs/"
        got = [arrays[key] for key in arrays if key.startswith(prefix)]
        want = [arrays[key] for key in arrays if key.startswith(other)]
        assert len(got) == len(want) > 0 and any(x.any() for x in want), name
        for at, (x, y) in enumerate(zip(got, want, strict=True)):
            close(x, y, 4 * SMALL["float32"], (name, at))
