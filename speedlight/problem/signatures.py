"""Signatures of public functions: help() and inspect show every option, and errors of arguments say what to write."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, ForwardRef, TypeVar

from ..errors import Error
from ..errors.advice import explain, unknown
from ..host.graph_breaks import in_graph, outside

_F = TypeVar("_F", bound=Callable[..., Any])


def public(options: Any = None, *, leaves_graph: bool = True, has_frame: bool = True) -> Callable[[_F], _F]:
    """Makes a function public: help() and inspect show each option, and errors of unknown arguments say what to write.

    Args:
        options: the dict of problem/options.py that its `**options` take. Without one, `**theirs` are refused.
        leaves_graph: torch.compile does not look into it, since memory addresses mean nothing to a tracer.
        has_frame: False where no signal may come between a result and the caller: Python handles signals when a
            decorator's call returns. Such a function leaves graphs and calls refuse_unknown() itself.
    """

    def decorate(function: _F) -> _F:
        _describe(function, options)
        if not has_frame:
            return function

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            if leaves_graph and "torch._dynamo" in sys.modules and in_graph():  # asked here first: a call costs more
                return outside(function, *args, **given)
            try:
                return function(*args, **given)
            except (TypeError, Error) as error:  # of arguments that do not fit, and of ours: hints say more
                explain(error, function, args, given)
                raise

        return call  # pyright: ignore[reportReturnType]

    return decorate


def refuse_unknown(function: Any, given: Mapping[str, Any]) -> None:
    """Raises for the first argument that is no option of a public function."""
    if not function.options.issuperset(given):
        name, *_ = [x for x in given if x not in function.options]
        raise unknown(function, name)


def _describe(function: Any, options: Any) -> None:
    """Adds options to the signature, the types and the documentation of a function."""
    listed = {} if options is None else options.__annotations__
    own = inspect.signature(function)
    if last := [x.name for x in own.parameters.values() if x.kind is x.VAR_KEYWORD]:
        shown = [x for x in own.parameters.values() if x.name != last[0]]
        names = {name: x.__origin__.__forward_arg__ for name, x in listed.items()}
        defaults = {name: x.__metadata__[0] for name, x in listed.items()}
        shown += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=names[name])
            for name in names
        ]
        function.__signature__ = own.replace(parameters=shown)
        del function.__annotations__[last[0]]
        function.__annotations__ |= {name: ForwardRef(x, module=options.__module__) for name, x in names.items()}
        function.options = frozenset(listed)
    lines = "".join([f"\n{{0}}{name}: {x.__metadata__[1]}" for name, x in listed.items()])
    given = re.compile(r"^( +)\*\*options: .*(\n\1 +.*)*$|^( +)q, k, v, .*\*\*options: .*$", re.MULTILINE)
    function.__doc__ = given.sub(lambda x: x[0] + lines.replace("{0}", x[1] or x[3]), function.__doc__ or "") or None
