"""The installed package, with nothing but what it requires: `make package` runs this in an environment of its own."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import speedlight as sl
from speedlight.errors import how_to_install


def main() -> None:
    place = Path(sl.__file__).resolve()
    assert Path(sys.prefix).resolve() in place.parents, f"expected the installed package; got {place}"
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 100, 16), dtype=np.float32)
    out, lse = sl.attention(q, k, v, causal=True, return_lse=True)
    want, bound = (f(q, k, v, causal=True) for f in (sl.reference.attention, sl.reference.error_bound))
    assert lse.shape == (1, 2, 100) and (np.abs(out - want) <= bound.out).all(), "an element is outside its bound"
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=16, capacity=100)
    cache.append(0, k, v)
    with tempfile.TemporaryDirectory() as folder:
        cache.save(Path(folder) / "c.safetensors")
        assert sl.KVCache.load(Path(folder) / "c.safetensors").keys(0).tobytes() == k.tobytes()
    assert not {"torch", "triton", "typer"} & set(sys.modules) and (place.parent / "py.typed").exists()
    told = subprocess.run([sys.executable, "-m", "speedlight.tools.cli"], capture_output=True, text=True, check=False)
    assert told.returncode and how_to_install("cli") in told.stderr, told.stderr
    there = sorted(f"{x.name} {x.version}" for x in importlib.metadata.distributions())
    print(f"speedlight {sl.__version__} attends on Python {sys.version.split()[0]}, beside {', '.join(there)}")


if __name__ == "__main__":
    main()
