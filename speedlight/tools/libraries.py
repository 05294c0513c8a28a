"""Libraries that we work with: their releases, and which of their private names that we rely on they have."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from ..host import insides

_NAMES = ("numpy", "llvmlite", "torch", "triton", "transformers", "jax", "onnx")
_INSIDES = {"torch": insides.TORCH, "transformers": insides.TRANSFORMERS}
_TABLES = {  # of the adapters, which say what was tested
    "torch": ("speedlight.torch.dot_product", "TORCH"),
    "transformers": ("speedlight.transformers.options", "TRANSFORMERS"),
    "jax": ("speedlight.jax", "JAX"),
}


def libraries_report() -> dict[str, dict[str, Any]]:
    """Returns of each installed library its version, the tested releases and its private names; imports some."""
    report = {}
    for name in _NAMES:
        try:
            report[name] = {"version": importlib.metadata.version(name)}
        except importlib.metadata.PackageNotFoundError:
            continue
        try:
            report[name] |= _details(name)
        except Exception as error:  # an installation that is broken, which this command is asked about
            report[name]["error"] = f"{type(error).__name__}: {error}"
    return report


def _details(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if name in _TABLES:
        module, table = _TABLES[name]
        found["tested"] = getattr(importlib.import_module(module), table).tested
    if name in _INSIDES:
        found["private_names"] = _INSIDES[name].found()
        found["without"] = _INSIDES[name].missing()
    return found


def library_rows(report: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Returns libraries_report() as lines: a library each, and each private name that it lacks."""
    rows = []
    for name, of in report.items():
        text = of["version"]
        if "tested" in of:
            text += ", tested " + " to ".join(dict.fromkeys(of["tested"]))
        if "private_names" in of:
            names = of["private_names"]
            text += f"; {sum(names.values())} of {len(names)} private names that are used are there"
        if "error" in of:
            text += f"; cannot be imported: {of['error']}"
        rows.append((name, text))
        rows += [("", f"without {path}: {way}") for path, way in of.get("without", {}).items()]
    return rows
