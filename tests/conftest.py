"""Shared by all tests: a cache of their own, vector units to run on, and what a short run leaves out."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import getpass
import os
import runpy
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SUPPORT = ROOT / "tests" / "support"

# The reference multiplies small matrices: NumPy's threads would spin, nine times as long as one of them computes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

if HIDDEN := os.environ.get("SPEEDLIGHT_TEST_HIDE"):  # as if the machine lacked vector units: make suite-avx2
    runpy.run_path(str(SUPPORT / "hidden" / "sitecustomize.py"))

import numpy as np  # noqa: E402
import pytest  # noqa: E402

os.environ.setdefault(
    "SPEEDLIGHT_CACHE_DIR",
    os.path.join(tempfile.gettempdir(), f"speedlight-tests-{getattr(os, 'getuid', getpass.getuser)()}"),
)

os.environ.setdefault("SPEEDLIGHT_TUNING", "0")  # of whoever runs them: schedules are as they ship

# pytest rewrites asserts, so that they say what differs, of modules that it collects; of what those import, if told so
HELPERS = sorted(x.stem for x in SUPPORT.glob("*.py"))
pytest.register_assert_rewrite(*HELPERS)

from engines import CPU, SMALL_TILES, Engine, one_vector, tuned  # noqa: E402
from problems import DIMS, DTYPES, LENGTHS  # noqa: E402
from tolerance import assert_gradients  # noqa: E402

from speedlight.cpu.runtime import compile as compiling  # noqa: E402
from speedlight.cpu.runtime import workers  # noqa: E402
from speedlight.host.machine import Isa, host_isas  # noqa: E402

FULL = os.environ.get("SPEEDLIGHT_FULL") == "1"
_start = subprocess.Popen.__init__


def start_hiding(self: Any, *args: Any, env: dict[str, str] | None = None, **options: Any) -> None:
    """Starts a process that lacks the hidden units, too, whatever its environment says."""
    env = dict(os.environ if env is None else env)
    env["PYTHONPATH"] = os.pathsep.join([str(SUPPORT / "hidden"), *filter(None, [env.get("PYTHONPATH")])])
    _start(self, *args, env=env, **options)


if HIDDEN:
    if any([need.startswith(HIDDEN) for x in host_isas() for need in x.needs]):
        raise RuntimeError("SPEEDLIGHT_TEST_HIDE: expected Linux, whose /proc/cpuinfo tells of flags.")
    subprocess.Popen.__init__ = start_hiding

# Many tests' kernels have a part in common, which takes LLVM longer than the rest: what became of it is kept, of more
# of them than in use.
compiling._compiled = functools.lru_cache(maxsize=None)(compiling._compiled.__wrapped__)

# Threads that share a CPU meet in more ways: tests run on as many as they ask for.
workers._limit = lambda: 1024

# not every system and Python has these; where one is missing, what is about it is left out
_ABOUT = {"jax": "adapters/jax", "transformers": "adapters/transformers", "triton": "*/test_gpu*.py"}
collect_ignore_glob = [files for package, files in _ABOUT.items() if find_spec(package) is None]


@pytest.fixture(params=[isa.name for isa in host_isas()])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every vector unit that this machine has."""
    monkeypatch.setenv("SPEEDLIGHT_ISA", request.param)
    return request.param


@pytest.fixture
def engine(isa: str) -> Iterator[Engine]:
    """What test_attention.py is about; other modules have another, and other sizes. On other units than the best a
    short run has the widest panels alone.
    """
    with contextlib.nullcontext() if FULL or isa == host_isas()[0].name else tuned(**one_vector(3)):
        yield CPU


@pytest.fixture
def gradients() -> Callable[..., Any]:
    """What test_backward.py is about: gradients against the reference; of another engine in another module."""
    return assert_gradients


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=DIMS, ids=str)
def dims(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.fixture(params=LENGTHS, ids=lambda x: f"{x[0]}-{x[1]}")
def lengths(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.fixture(params=[75])
def queries(request: pytest.FixtureRequest) -> int:
    """How many there are where masks are tested."""
    return request.param


@pytest.fixture
def one_width() -> Iterator[None]:
    """A short run has panels of one vector where their width is not what is tested: a third of the kernels."""
    with contextlib.nullcontext() if FULL else tuned(**one_vector(1)):
        yield


@pytest.fixture
def small_tiles() -> Iterator[None]:
    """A short run's kernels hold few sums at once where what is tested is above them: half of LLVM's work."""
    with contextlib.nullcontext() if FULL else tuned(tiles=(SMALL_TILES,)):
        yield


@pytest.fixture
def one_kernel(one_width: None, small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short run decodes nothing, either, where what is tested is above the engine: half of the kernels again."""
    if not FULL:
        from speedlight.cpu.engine import backward_schedule, schedule

        monkeypatch.setattr(schedule, "DECODE_ROWS", 0)
        monkeypatch.setattr(backward_schedule, "_WORTH", {3: 1.0})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A short run has the tests of every unit, dtype and option, not of each combination: kernels take long to make."""
    if FULL:
        return
    functions: dict[str, list[pytest.Item]] = {}
    for x in items:
        functions.setdefault(x.nodeid.partition("[")[0], []).append(x)
    kept = {id(x) for tests in functions.values() for x in choose_short(tests)}
    config.hook.pytest_deselected(items=[x for x in items if id(x) not in kept])
    items[:] = [x for x in items if id(x) in kept]


@pytest.hookimpl(hookwrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Half a million objects, most of them libraries', stay as they are: the garbage collector leaves them out. It
    looks through all that it knows every few kernels, which took as long as writing one.
    """
    gc.disable()
    if may_ask_the_gpu(session.config):
        import on_gpu  # noqa: F401
    yield
    gc.freeze()
    gc.set_threshold(300_000, 20, 20)  # a kernel is some 100,000 objects, no garbage until it is text
    gc.enable()


def may_ask_the_gpu(config: pytest.Config) -> bool:
    """Then Triton's interpreter is set up before any test module is imported: some load Triton, whose functions stay
    what they were then, interpreted or not.
    """
    asked = [Path(x.partition("::")[0]) for x in config.args]
    starts_others = bool(config.getoption("numprocesses", None))  # which collect
    is_there = find_spec("triton") is not None
    return is_there and not starts_others and any(x.is_dir() or x.name.startswith("test_gpu") for x in asked)


def choose_short(tests: list[pytest.Item]) -> list[pytest.Item]:
    """Returns those of one function's tests that a short run has.

    `@pytest.mark.each("dtype", "options")`: on the best vector unit every value of these, not every combination; all
    tests without it. `@pytest.mark.units("dtype")`: on each other unit one test for every value of these, and one test
    where it names none; no test without it. The twin of the best, whose product is another one, has the best's tests.
    """
    units: dict[object, list[pytest.Item]] = {}
    for x in tests:
        if not is_twin(x):
            units.setdefault(x.callspec.params.get("isa") if hasattr(x, "callspec") else None, []).append(x)
    best, *others = units.values() if units else [[]]
    each, elsewhere = (tests[0].get_closest_marker(x) for x in ("each", "units"))
    chosen = [x for x, _ in on_a_diagonal(best, each.args)] if each else best
    if twin := twin_of_the_best():
        alike = {x.name.replace(host_isas()[0].name, twin.name) for x in chosen}
        chosen = chosen + [x for x in tests if x.name in alike and not is_twin(x)]
    if elsewhere:
        for some in others:
            chosen = chosen + list({row: x for x, row in reversed(on_a_diagonal(some, elsewhere.args))}.values())
    return chosen


def on_a_diagonal(tests: list[pytest.Item], axes: tuple[str, ...]) -> list[tuple[pytest.Item, tuple[int, ...]]]:
    """Returns tests that together have every value of these parameters, not every combination, each with its values'
    numbers."""
    values: dict[str, dict[int, int]] = {axis: {} for axis in axes}  # and which of them it is
    places = [
        tuple(known.setdefault(id(x.callspec.params[axis]), len(known)) for axis, known in values.items())
        for x in tests
    ]
    sizes = [len(known) for known in values.values()]
    rows = {tuple(n % size for size in sizes) for n in range(max(sizes, default=1))}
    return [(x, place) for x, place in zip(tests, places, strict=True) if place in rows]


def is_twin(test: pytest.Item) -> bool:
    """On a unit that differs from the best one in the product of bfloat16 alone, and not with bfloat16."""
    of = test.callspec.params if hasattr(test, "callspec") else {}
    twin = twin_of_the_best()
    return twin is not None and of.get("isa") == twin.name and of.get("dtype") != "bfloat16"


def twin_of_the_best() -> Isa | None:
    """The unit that computes as the best one does, but for bfloat16."""
    units = host_isas()[:2]
    alike = len(units) == 2 and len({(x.vector_bytes, x.registers) for x in units}) == 1
    return units[1] if alike else None


def differing_units() -> list[Isa]:
    """Every vector unit; in a short run without the twin of the best."""
    return [x for x in host_isas() if FULL or x != twin_of_the_best()]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def rubbish(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Iterator[None]]:
    """`for _ in rubbish(module)`: the scratch that it takes holds zeros, then NaN, then large numbers."""

    def each_fill(module: Any) -> Iterator[None]:
        for fill in (0x00, 0xFF, 0x7F):

            def take(size: int, fill: int = fill) -> ctypes.Array:
                scratch = (ctypes.c_char * size)()
                ctypes.memset(scratch, fill, size)
                return scratch

            monkeypatch.setattr(module, "take_scratch", take)
            monkeypatch.setattr(module, "give_scratch", lambda scratch: None)
            yield

    return each_fill


@pytest.fixture(autouse=True)
def default_threads() -> Iterator[None]:
    yield
    import speedlight as sl

    sl.set_threads(None)
