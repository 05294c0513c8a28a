"""Exceptions, and what errors say to people who know other libraries' names."""

from .exceptions import (
    ArgumentError,
    ArgumentTypeError,
    CacheBusy,
    CacheFull,
    CommunicationError,
    CompileError,
    Error,
    ExpressionError,
    FileError,
    ReservationError,
    UnsupportedError,
    has,
    how_to_install,
    not_pickled,
    of_a_handler,
    pass_on,
    rename,
    shown,
)

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CacheBusy",
    "CacheFull",
    "CommunicationError",
    "CompileError",
    "Error",
    "ExpressionError",
    "FileError",
    "ReservationError",
    "UnsupportedError",
    "has",
    "how_to_install",
    "not_pickled",
    "of_a_handler",
    "pass_on",
    "rename",
    "shown",
]

for _error in (
    ArgumentError, ArgumentTypeError, CacheBusy, CacheFull, CommunicationError, CompileError, Error, ExpressionError,
    FileError, ReservationError, UnsupportedError,
):  # fmt: skip
    _error.__module__ = __name__  # what tracebacks and pickles say: where users find it
del _error
