"""Exceptions, each a `speedlight.Error` and also the built-in type a caller would expect, and how code reports them."""

from __future__ import annotations

import re
import reprlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 60


def shown(x: Any) -> str:
    """An argument as a message shows it: short, whatever it is and whatever its repr() does."""
    try:
        return _SHORT.repr(x)
    except Exception:  # an int of more digits than Python prints, a repr() that raises
        return f"a value of type {type(x).__name__}"


def join_words(words: Iterable[str], last: str = "or") -> str:
    """Returns words as a sentence has them: "a, b or c"."""
    *rest, end = words
    return f"{', '.join(rest)} {last} {end}" if rest else end


_warned: set[str] = set()


def warn_once(what: str, message: str) -> None:
    """Warns of something the first time in a process, at the place that called the caller."""
    if what not in _warned:
        _warned.add(what)
        warnings.warn(f"speedlight: {message}", RuntimeWarning, stacklevel=3)


# whether the package is on the package index: the one place that knows. The commit of the first release says True
PUBLISHED = False


def how_to_install(extra: str) -> str:
    """Returns the command that brings what an extra of pyproject.toml names."""
    if PUBLISHED:
        return f"pip install 'speedlight[{extra}]'"
    return f"pip install '.[{extra}]' in a clone of speedlight's repository"


ADAPTED = ("torch", "transformers", "jax", "onnx")  # libraries with an extra of their name


def not_installed(package: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Returns the error of an adapter whose library is missing, with the command that installs it."""
    own, root = package.rpartition(".")[2], (error.name or "").partition(".")[0]
    if root not in ADAPTED:
        return error
    way = how_to_install(own if own in ADAPTED else root)
    return ModuleNotFoundError(f"{package} needs {root} ({error}). Install it with: {way}", name=error.name)


# By these, libraries and arguments of every kind say that they cannot do what they were asked for
_REFUSALS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    BufferError,
    RuntimeError,
)


def pass_on(error: Exception, refusals: type[Exception] | tuple[type[Exception], ...] = _REFUSALS) -> None:
    """Raises once more what says nothing of the argument that another's code was asked about: MemoryError, an exception
    of a signal handler, whatever its type, and types other than `refusals` (OSError, the caller's own …).

    First in every `except` around code that is not ours; the rest may then be told in our words, `from error`.
    """
    if isinstance(error, MemoryError) or not isinstance(error, refusals) or of_a_handler(error):
        raise error


def of_a_handler(error: Exception) -> bool:
    """Returns whether a signal handler raised it: Python calls those with the frame that the signal interrupted."""
    interrupted, trace = None, error.__traceback__
    while trace is not None:
        given = trace.tb_frame.f_locals.values() if interrupted is not None else ()
        if any([x is interrupted or (type(x) is tuple and any([y is interrupted for y in x])) for x in given]):
            return True
        interrupted, trace = trace.tb_frame, trace.tb_next
    return False


class Error(Exception):
    """Base class of everything speedlight raises on purpose. Every one can be pickled and copied.

    >>> import numpy as np, speedlight as sl
    >>> try:
    ...     sl.attention(np.ones((2, 2)), np.ones((2, 2)), np.ones((2, 2)))
    ... except sl.Error as error:
    ...     print(error)
    q: expected 4 dimensions (batch, heads, length, head_dim) for layout='bhld'; got shape (2, 2).
    """


def rename(error: Error, names: dict[str, str]) -> None:
    """Gives arguments, and methods such as "truncate()", in a message the names that the caller knows them by."""
    arguments, methods = ([re.escape(x) for x in names if x.endswith("()") == ours] for ours in (False, True))
    words = [rf"\b(?:{'|'.join(arguments)})\b(?![-(]|=lambda)"] if arguments else []
    words += [rf"\b(?:{'|'.join(methods)})"] if methods else []
    text = re.sub("|".join(words), lambda found: names[found[0]], str(error))
    error.args = (text, *error.args[1:])


class ArgumentError(Error, ValueError):
    """An argument has a wrong value. The message names it, what was expected, what came, and the way out."""


class ArgumentTypeError(Error, TypeError):
    """An argument has a wrong type or dtype."""


class UnsupportedError(Error, NotImplementedError):
    """The request is well formed, but this machine or this version cannot serve it."""


class ExpressionError(Error, TypeError):
    """A mask or score function cannot be traced, or means nothing. `place`: where in it, as the message says, too."""

    place = ""


class CompileError(Error, RuntimeError):
    """A kernel could not be compiled or loaded."""


class FileError(Error, OSError):
    """A file cannot be read or written as asked."""


class CacheFull(Error, MemoryError):
    """A key-value cache has no room. `needed` and `free` count tokens (or pages); nothing has been written."""

    # pickle and copy make an error of its message alone, and then set its attributes: others have defaults
    def __init__(self, message: str, needed: int = 0, free: int = 0) -> None:
        super().__init__(message)
        self.needed, self.free = needed, free


class ReservationError(Error, MemoryError):
    """The memory of a cache or pool cannot be reserved."""


class CacheBusy(Error, RuntimeError):
    """Another thread is appending to the same sequence."""


class CommunicationError(Error, RuntimeError):
    """A process of a group ended, or did not answer in time. `rank`: whose answer was missing, in the whole world;
    None where nobody knows."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


def not_pickled(name: str, way: str) -> Callable[[Any], NoReturn]:
    """A class's __reduce__: pickle, and copy, would take memory that handles or processes share for plain data."""

    def refuse(self: Any) -> NoReturn:
        raise UnsupportedError(f"{name}: expected neither pickle nor the copy module; {way}.")

    return refuse
