"""Tile registers have the bits of the same arithmetic by vectors, on this machine: `make check-amx`. Needs AMX."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from tile_problems import problems, results

from speedlight.host.machine import cpu_name, isa_named, runnable_isas


def main() -> None:
    if isa_named("amx") not in runnable_isas():
        sys.exit(f"check-amx: expected a CPU with AMX, and Linux 5.16 or later; this is {cpu_name()}.")
    count, wrong = 0, []
    for seed in range(int(os.environ.get("ROUNDS", "10"))):
        for p in problems(1000 * seed):
            seen = []
            for unit in ("amx", "amx-software"):
                os.environ["SPEEDLIGHT_ISA"] = unit
                seen.append(results(p))
            count += 1
            if seen[0] != seen[1]:
                wrong.append(p)
    print("\n".join(map(str, wrong)) or f"{count} problems, the same bits on amx and amx-software")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
