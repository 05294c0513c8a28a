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


def _name_their_home() -> None:
    """Has tracebacks and pickles of every error say where users find it."""
    for x in list(globals().values()):
        if isinstance(x, type) and issubclass(x, Error):
            x.__module__ = __name__


_name_their_home()
