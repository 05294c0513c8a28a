"""install() and uninstall(): code that imports flash_attn finds speedlight's."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

from .. import ArgumentError
from ..adapting import shown
from . import bert_padding, block_sparsity, interface, kernels, v3, v4

VERSION = "2.8.4"  # of flash-attn, whose calls these are
_PRIVATE = tuple(name for name in vars(kernels) if name.startswith("_flash_attn_"))
_CALLS = tuple(name for name in vars(interface) if name.startswith("flash_attn_"))
_PADDING = tuple(name for name in vars(bert_padding) if "pad_input" in name or name.endswith("first_axis"))
_before: dict[str, types.ModuleType | None] = {}


def install(versions: tuple[int, ...] = (2,)) -> None:
    """Provides speedlight's calls under the name flash_attn, until uninstall(): `import flash_attn` finds them.

    Args:
        versions: 2: the modules flash_attn, flash_attn.flash_attn_interface and flash_attn.bert_padding. 3:
            flash_attn_interface. 4: flash_attn.cute (and flash_attn, with version 2's calls).

    A flash_attn that was imported before is put aside; modules that took functions from it keep them. A library that
    asks for a GPU before it uses flash_attn still does.

    >>> import speedlight.flash_attn
    >>> speedlight.flash_attn.install()
    >>> from flash_attn import flash_attn_func
    >>> from flash_attn.bert_padding import unpad_input
    >>> speedlight.flash_attn.uninstall()
    """
    if not isinstance(versions, (tuple, list)) or not versions or [n for n in versions if n not in (2, 3, 4)]:
        raise ArgumentError(f"versions: expected a tuple of 2, 3 and 4, as (2,) or (2, 3, 4); got {shown(versions)}.")
    new = {}
    if 2 in versions or 4 in versions:
        new |= _make_version_2()
    if 3 in versions:
        new["flash_attn_interface"] = _make_module(
            "flash_attn_interface", v3, (*v3.__all__, "_flash_attn_forward", "_flash_attn_backward")
        )
    if 4 in versions:
        new["flash_attn.cute"] = _make_module("flash_attn.cute", v4, v4.__all__, package=True)
        new["flash_attn.cute.interface"] = _make_module("flash_attn.cute.interface", v4, v4.__all__)
        lists = _make_module("flash_attn.cute.block_sparsity", block_sparsity, block_sparsity.__all__)
        new["flash_attn.cute.block_sparsity"] = lists
        vars(new["flash_attn.cute"]).update(interface=new["flash_attn.cute.interface"], block_sparsity=lists)
        vars(new["flash_attn"])["cute"] = new["flash_attn.cute"]
    uninstall()
    parts = [name for name in sys.modules if name.startswith("flash_attn.")] if "flash_attn" in new else []
    for name in {*parts, *new}:
        _before[name] = sys.modules.pop(name, None)
    sys.modules.update(new)


def uninstall() -> None:
    """Removes what install() provided, and restores what was there before. Does nothing without install().

    >>> import speedlight.flash_attn
    >>> speedlight.flash_attn.uninstall()
    """
    for name, module in _before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module
    _before.clear()


def _make_version_2() -> dict[str, types.ModuleType]:
    top = _make_module("flash_attn", interface, _CALLS, package=True)
    calls = _make_module("flash_attn.flash_attn_interface", interface, _CALLS)
    vars(calls).update({name: getattr(kernels, name) for name in _PRIVATE})
    padding = _make_module("flash_attn.bert_padding", bert_padding, _PADDING)
    vars(top).update(flash_attn_interface=calls, bert_padding=padding)
    return {x.__name__: x for x in (top, calls, padding)}


def _make_module(name: str, source: types.ModuleType, names: Any, *, package: bool = False) -> types.ModuleType:
    """Makes a module of that name with some of what another one has."""
    made = types.ModuleType(name, f"{source.__doc__} Installed by speedlight.flash_attn.install().")
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=package)
    made.__package__ = name if package else name.rpartition(".")[0]
    if package:
        made.__path__ = []
    vars(made).update({x: getattr(source, x) for x in names}, __version__=VERSION)
    return made
