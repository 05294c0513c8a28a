"""Architectures of transformers, stock and under attn_implementation="speedlight": `run.py architectures`.

    python benchmarks/architectures.py KIND/NAME ...

is one of the processes: it prints a row of JSON for each. A dozen share a process, so that none ends the sweep.
Each is made small from its configuration; compared are logits (whole, padded left and right, at tokens that are none),
gradients of a loss and the tokens that are generated, from transformers' cache and from speedlight's. Rows of models
with latent attention say if kv_b_proj was absorbed, or why not.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import small
import torch

import speedlight.torch
import speedlight.transformers

KINDS = small.KINDS
_TOLD = {
    "equal": ("equal",),
    "differs": ("differs",),
    "refused": ("refused",),
    "not taken: attention of their own": ("not taken",),
    "asks for no attention": ("no attention",),
    "not tried: small, or with text alone, it does not run in transformers": ("stock fails", "not made"),
}
LEGEND = "Errors are of the largest logit or gradient: of logits, padded left, padded right; of gradients."
_BOUNDS = {"logits": 2e-5, "gradients": 1e-4, "tokens": 0.0}  # of the largest, in float32
_SECONDS, _TOGETHER = 120, 12
_HIDDEN = 4  # tokens of padding
_OF_SOUND = ("speech", "transcribers")
Found = dict[str, torch.Tensor]


def rows(only: str = "") -> Iterator[dict[str, Any]]:
    """Yields a row for each architecture of a kind; of those that a process ends with, that it did."""
    left = [f"{kind}/{name}" for kind, name in small.names(only)]
    while left:
        some, got = left[:_TOGETHER], 0
        command = [sys.executable, __file__, *some]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            for line in process.stdout:
                if line.startswith('{"name"'):
                    got += 1
                    yield json.loads(line)
            errors = process.stderr.read()
        if got < len(some):
            kind, name = some[got].split("/")
            last = ([x for x in errors.splitlines() if x.strip()] or [f"exit code {process.returncode}"])[-1]
            yield {"name": name, "kind": kind, "verdict": "not made", "said": f"the process ended: {last}"}
            got += 1
        left = left[got:]


def line(row: dict[str, Any]) -> str:
    """Returns a row as text."""
    errors = " ".join(f"{x:.0e}" for x in row.get("errors", {}).values())
    cache = f"; with Cache: {row['cache']}" if row.get("cache", "equal") not in ("equal", None) else ""
    latents = f"; latents: {row['latents']}" if row.get("latents") else ""
    return f"{row['kind']:16} {row['name']:24} {row['verdict']:12} {errors}{cache}{latents}  {row['said']}"


def table(rows: list[dict[str, Any]]) -> str:
    """Returns names by verdict, as docs/benchmarks.md has them."""
    lines = [f"Of {len(rows)} architectures:", "", "| | | |", "|---|---|---|"]
    for told, verdicts in _TOLD.items():
        found = [row for row in rows if row["verdict"] in verdicts]
        told = f"{told} ({len(found)})"
        for kind in KINDS:
            names = sorted(row["name"] for row in found if row["kind"] == kind)
            if names:
                lines.append(f"| {told} | {kind} ({len(names)}) | {', '.join(names)} |")
                told = ""
    latents: dict[str, list[str]] = {}
    for row in rows:
        if row.get("latents"):
            latents.setdefault(row["latents"], []).append(row["name"])
    lines += ["", *(f"Latents: {said} ({len(x)}): {', '.join(sorted(x))}" for said, x in sorted(latents.items()))]
    return "\n".join(lines).rstrip()


def measure(kind: str, name: str) -> dict[str, Any]:
    """Returns the row of an architecture."""
    row: dict[str, Any] = {"name": name, "kind": kind, "verdict": "not made", "said": ""}
    try:
        if not small.find(kind, name)._can_set_attn_implementation():
            return row | {"verdict": "not taken"}
        one = small.make(kind, name)
    except Exception as error:
        return row | {"said": _words(error)}
    checks, stock, failed = _checks(one), {}, {}
    for check, run in checks.items():
        found = _attempt(run, failed, check)
        stock |= {} if found is None else {check: found}
    useful = {check: want for check, want in stock.items() if all(x.isfinite().all() for x in want.values())}
    row["stock"] = failed | dict.fromkeys(stock.keys() - useful.keys(), "not finite")
    if not useful:
        return row | {"verdict": "stock fails", "said": "; ".join(dict.fromkeys(row["stock"].values()))}
    return row | _compare(one, {check: (want, checks[check]) for check, want in useful.items()})


def _compare(one: small.Small, checks: dict[str, tuple[Found, Callable[[Any], Found]]]) -> dict[str, Any]:
    """Returns what is to say of results under "speedlight", beside those of transformers' default, or of eager."""
    errors, refused, eager = {}, {}, []
    with _counting() as calls:
        one.model.set_attn_implementation("speedlight")
        speedlight.torch.report(reset=True)
        got = {check: _attempt(run, refused, check) for check, (_, run) in checks.items()}
        cache = _with_cache(one.model, *checks["tokens"]) if "tokens" in checks else None
    for check, found in got.items():
        if found is not None:
            errors[check] = _error(found, checks[check][0])
            if errors[check] > _bound(check):  # not every default is eager's
                one.model.set_attn_implementation("eager")
                beside = _error(found, _attempt(checks[check][1], {}, check) or {})
                eager += [check] if beside <= _bound(check) else []
                errors[check] = min(errors[check], beside)
    wrong = [check for check, x in errors.items() if not x <= _bound(check)]
    told = {"errors": errors, "calls": len(calls), "cache": cache, "latents": _latents()}
    if refused:
        of = {x: [check for check in refused if refused[check] == x] for x in refused.values()}
        return told | {"verdict": "refused", "said": "; ".join(f"{', '.join(of[x])}: {x}" for x in of)}
    if wrong:
        return told | {"verdict": "differs", "said": ", ".join(wrong)}
    said = f"{', '.join(eager)}: as eager, from which transformers' default differs" if eager else ""
    return told | {"verdict": "equal" if calls else "no attention", "said": said}


def _latents() -> str | None:
    """Returns "absorbed" where layers of latent attention attended to latents, and why others did not."""
    report = speedlight.torch.report()
    why = {reason for name, reason in report.left if name.endswith(".expand_kv")} - {"gradients are recorded"}
    said = ["absorbed"] if any(name.endswith(".expand_kv") for name in report.taken) else []
    return ", ".join((*said, *sorted(why))) or None


def _attempt(run: Callable[[Any], Found], failed: dict[str, str], check: str) -> Found | None:
    try:
        return run(None)
    except Exception as error:
        failed[check] = _words(error)
        return None


def _with_cache(model: Any, want: Found, run: Callable[[Any], Found]) -> str:
    """Returns "equal" where tokens are those of transformers' cache: its default, or one that is given."""
    try:
        got = run(_cache(model.config, speedlight.transformers.Cache(model.config, capacity=128)))
        given = want if _error(got, want) == 0 else run(_cache(model.config, small.transformers.DynamicCache()))
        return "equal" if _error(got, given) == 0 else "differs"
    except Exception as error:
        return _words(error)


def _bound(check: str) -> float:
    return _BOUNDS.get(check, _BOUNDS["logits"])


def _checks(one: small.Small) -> dict[str, Callable[[Any], Found]]:
    """Returns what is compared, by name: functions of a cache."""
    model, given = one.model, {"logits": one.inputs}
    shown = torch.ones(next(iter(one.inputs.values())).shape[:2], dtype=torch.int64)
    if one.takes_masks:
        length = shown.shape[1] * _HIDDEN // small.TOKENS
        left, right = shown.clone(), shown.clone()
        left[0, :length] = right[0, -length:] = 0
        masks = {"right": right} if one.kind in _OF_SOUND else {"left": left, "right": right}
        given |= {side: one.inputs | {"attention_mask": mask} for side, mask in masks.items()}
    rows = "" if "decoder_input_ids" in one.inputs or one.kind in _OF_SOUND else "attention_mask"
    checks: dict[str, Callable[[Any], Found]] = {
        name: functools.partial(_logits, model, x, x.get(rows)) for name, x in given.items()
    }
    last = given.get("right", one.inputs)
    checks["gradients"] = functools.partial(_gradients, model, last, last.get(rows))
    if one.generates:
        first = given.get("left", one.inputs)
        prompt = {name: x for name, x in first.items() if name != "decoder_input_ids"}
        checks["tokens"] = functools.partial(_tokens, model, prompt)
    return checks


def _forward(model: Any, inputs: Found, seen: torch.Tensor | None) -> torch.Tensor:
    torch.manual_seed(3)
    logits = model(**inputs).logits
    return logits if seen is None else logits[seen.bool()]


@torch.no_grad()
def _logits(model: Any, inputs: Found, seen: torch.Tensor | None, _: Any) -> Found:
    return {"logits": _forward(model, inputs, seen)}


def _gradients(model: Any, inputs: Found, seen: torch.Tensor | None, _: Any) -> Found:
    """Those of a cross-entropy: of tokens that are none, and of the first half of a sound, before its padding."""
    model.zero_grad()
    logits = _forward(model, inputs, seen)
    logits = logits if "input_ids" in inputs or "pixel_values" in inputs else logits[:, : logits.shape[1] // 2]
    labels = torch.arange(logits[..., 0].numel()) % logits.shape[-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels).backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def _tokens(model: Any, inputs: Found, cache: Any) -> Found:
    given = inputs if cache is None else inputs | {"past_key_values": cache}
    torch.manual_seed(3)
    found = model.generate(**given, max_new_tokens=small.NEW, min_new_tokens=small.NEW, do_sample=False, num_beams=1)
    return {"tokens": found.double()}


def _cache(config: Any, own: Any) -> Any:
    if not config.is_encoder_decoder:
        return own
    return small.transformers.EncoderDecoderCache(own, small.transformers.DynamicCache())


def _error(got: Found, want: Found) -> float:
    """Returns the largest difference, of the largest number; infinite where other things came."""
    if got.keys() != want.keys() or any(got[name].shape != want[name].shape for name in want):
        return math.inf
    named = [name for name, x in want.items() if x.numel()]
    most = max(float(want[name].abs().max()) for name in named)
    apart = max(float((got[name] - want[name]).abs().max()) for name in named)
    return apart / most if most > 0 else math.inf if apart else 0.0


@contextlib.contextmanager
def _counting() -> Iterator[list[None]]:
    """Yields a list that grows with each call of attention."""
    table = small.transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping
    whole, calls = table["speedlight"], []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(None)
        return whole(*args, **options)

    table["speedlight"] = counted
    try:
        yield calls
    finally:
        table["speedlight"] = whole


def _words(error: Exception) -> str:
    first = re.sub(r"\s+", " ", str(error))[:200]
    return f"{type(error).__name__}: {first}"


def _stop(*_: Any) -> None:
    raise TimeoutError(f"more than {_SECONDS} s")


def main(words: list[str]) -> None:
    """Prints rows, each within its time."""
    warnings.simplefilter("ignore")
    small.transformers.utils.logging.set_verbosity_error()
    speedlight.transformers.register()
    signal.signal(signal.SIGALRM, _stop)
    for word in words:
        kind, name = word.split("/")
        signal.alarm(_SECONDS)
        row = measure(kind, name)
        signal.alarm(0)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
