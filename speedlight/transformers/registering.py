"""register(): transformers learns the name "speedlight"."""

from __future__ import annotations

import importlib.metadata
import re
import warnings
from collections.abc import Iterable
from typing import Any

from ..errors import ArgumentTypeError, UnsupportedError, shown

TESTED = ("5.23", "5.23")  # the first and the last release of transformers that the tests have run on
_replaced: dict[str, Any] = {}  # what "sdpa" was


def register(*, replace_sdpa: bool = False, harmless: Iterable[str] = ()) -> None:
    """From now on `attn_implementation="speedlight"` is a choice for every model of transformers in this process.

    Args:
        replace_sdpa: "sdpa" is computed here, too, with the masks that transformers makes for it: what continuous
            batching needs, which takes no other name on a CPU. unregister() gives it back.
        harmless: names of options that models hand on to attention and that change nothing of it, beside those that
            are known; any other is an error.

    Raises:
        speedlight.Error: transformers is missing, or older than what was tested. A newer one is a warning.

    >>> import speedlight.transformers
    >>> speedlight.transformers.register()
    >>> from transformers import AttentionInterface
    >>> "speedlight" in AttentionInterface()
    True
    """
    if not isinstance(replace_sdpa, bool):
        raise ArgumentTypeError(f"replace_sdpa: expected True or False; got {shown(replace_sdpa)}.")
    names = frozenset(harmless)
    if isinstance(harmless, str) or not all([isinstance(x, str) for x in names]):
        raise ArgumentTypeError(f"harmless: expected names, as ('layer_scale',); got {shown(harmless)}.")
    check_version(_installed())
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from . import attending
    from .masks import attention_mask

    attending.harmless |= names
    AttentionInterface.register("speedlight", attending.attention_forward)
    AttentionMaskInterface.register("speedlight", attention_mask)
    if replace_sdpa and not _replaced:
        _replaced["sdpa"] = AttentionInterface._global_mapping["sdpa"]
        AttentionInterface.register("sdpa", attending.attention_forward)


def unregister() -> None:
    """Gives "sdpa" back, if register() took it. "speedlight" stays: models that were made with it need it."""
    from transformers.modeling_utils import AttentionInterface

    if _replaced:
        AttentionInterface.register("sdpa", _replaced.pop("sdpa"))


def check_version(installed: str | None) -> None:
    """Raises for a release of transformers that is missing or too old; warns of one that is newer than any tested."""
    first, last = TESTED
    if installed is None:
        raise UnsupportedError(
            f"transformers: expected {first}; none is installed. pip install 'transformers=={first}.*'"
        )
    if _numbers(installed) < _numbers(first):
        raise UnsupportedError(
            f"transformers: expected {first} or newer, whose interfaces for attention and masks are used; got "
            f"{installed}. pip install -U 'transformers>={first}'"
        )
    if _numbers(installed) > _numbers(last):
        warnings.warn(
            f"transformers {installed} is newer than {last}, the last one that speedlight was tested with; compare a "
            f"few results with attn_implementation='eager', or pip install 'transformers=={last}.*'.",
            stacklevel=3,
        )


def _installed() -> str | None:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor: 5.23 of 5.23.1.dev0."""
    return tuple(int(x) for x in re.findall(r"\d+", version)[:2])
