"""register(): transformers learns the name "speedlight"."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from typing import Any, get_args

from .. import ArgumentError, ArgumentTypeError
from ..adapting import shown
from .options import TRANSFORMERS, LatentMode

_replaced: dict[str, Any] = {}  # transformers' own "sdpa"


def register(*, replace_sdpa: bool = False, harmless: Iterable[str] = (), mla: LatentMode = "auto") -> None:
    """Registers `attn_implementation="speedlight"` for every model of transformers in this process.

    Args:
        replace_sdpa: "sdpa" is computed here, too, with the masks that transformers makes for it: what continuous
            batching needs, which takes no other name on a CPU. unregister() gives it back.
        harmless: names of options that models hand on to attention and that change nothing of it, beside those that
            are known; any other is an error.
        mla: how models of latent attention (DeepSeek, Kimi, GLM and others) attend to the latents that they cache.
            "stock": they expand all of them at every call. "absorbed": kv_b_proj goes into the query and the output,
            and latents are read as they lie. "auto": absorbed in calls of few queries, where that takes fewer FLOPs.
            The last register() counts. speedlight.torch.report() names layers that are left to "stock", and why.

    Raises:
        speedlight.Error: transformers is missing, or older than what was tested.

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
    if mla not in get_args(LatentMode):
        raise ArgumentError(f"mla: expected 'auto', 'absorbed' or 'stock'; got {shown(mla)}.")
    TRANSFORMERS.check_version(_installed())
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from . import absorbing, attending
    from .masks import attention_mask

    attending.harmless |= names
    AttentionInterface.register("speedlight", attending.attention_forward)
    AttentionMaskInterface.register("speedlight", attention_mask)
    absorbing.set_mode(mla, attending.attention_forward)
    if replace_sdpa and not _replaced:
        _replaced["sdpa"] = AttentionInterface()["sdpa"]
        AttentionInterface.register("sdpa", attending.attention_forward)


def unregister() -> None:
    """Restores "sdpa", if register() replaced it.

    Models of latent attention expand their keys again, as transformers does. "speedlight" stays, since models that were
    made with it need it.
    """
    from transformers.modeling_utils import AttentionInterface

    from . import absorbing

    absorbing.set_mode("stock")

    if _replaced:
        AttentionInterface.register("sdpa", _replaced.pop("sdpa"))


def _installed() -> str | None:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None
