"""Cache: transformers' cache over KVCache, which attention reads where it lies."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
import torch
import transformers.cache_utils as theirs

from .. import ArgumentError, ArgumentTypeError, CacheBusy, FileError, KVCache, UnsupportedError
from ..adapting import Renamed
from ..arrays.dtypes import CODES, code_cache
from ..arrays.integers import integer
from ..errors import shown
from ..host.insides import TORCH
from ..kv import saving
from ..kv.prefixes import token_rows
from ..problem.checks import MOST, cache_dtype, checked_sizes, new_totals
from ..problem.options import Dtype, DtypeName
from ..problem.signatures import public
from .masks import MaskSpec

if TYPE_CHECKING:
    from typing_extensions import Self

_DTYPES: dict[torch.dtype, DtypeName] = {
    torch.float32: "float32", torch.float64: "float64", torch.float16: "float16", torch.bfloat16: "bfloat16",
}  # fmt: skip
# what of a config says which model's keys and values they are, beside its name and the kinds of its layers
_IDENTITY = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "sliding_window",
    "attention_chunk_size", "rope_parameters",
)  # fmt: skip
_IN_PLACE = 16  # rows from which on results are written where they go, instead of being moved there


class StandIn(torch.Tensor):
    """Tensor without memory that stands for another, which stored() makes: any operation computes with that one."""

    @classmethod
    def make(cls, shape: tuple[int, ...], like: torch.Tensor) -> Self:
        """Returns one of a shape, of the dtype and device of another tensor."""
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)

    def stored(self) -> torch.Tensor:
        """Returns the tensor that it stands for."""
        raise NotImplementedError

    # what is computed of it is a plain tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        plain = lambda x: x.stored() if isinstance(x, StandIn) else x  # noqa: E731
        return function(*TORCH.tree_map(plain, args), **TORCH.tree_map(plain, options or {}))


class Kept(StandIn):
    """Keys or values that lie in a cache: Cache.update() gives them to a model, that hands them to attention_forward().

    To anything else it is a copy of the tokens.
    """

    layer: Layer
    part: str
    length: int  # tokens of the layer, with those of the update() that made it
    given: tuple[torch.Tensor, torch.Tensor] | None  # what that update() took

    @staticmethod
    def of(layer: Layer, part: str, like: torch.Tensor, shape: tuple[int, ...], length: int, given: Any = None) -> Kept:
        made = Kept.make(shape, like)
        made.layer, made.part, made.length, made.given = layer, part, length, given
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Kept({self.part}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def stored(self) -> torch.Tensor:
        """Returns a copy."""
        return self.layer.stored(self)


_METHODS = Renamed({"truncate()": "crop()"})
_BEAMS, _INDICES = Renamed({"batch_indices": "beam_idx"}), Renamed({"batch_indices": "indices"})


class _Tokens(KVCache):
    """A KVCache in a Layer, whose errors give advice that a Cache can follow."""

    def synchronize(self) -> None:
        with _METHODS:
            super().synchronize()

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "Cache: expected no pickle of tokens that are held. Copy it here with copy.deepcopy(), or save() it, and "
            "Cache.load() it where it is wanted."
        )


class Layer(theirs.CacheLayerMixin):
    """A layer of a Cache: a KVCache of its own.

    What update() takes waits for attention_forward(), which appends it and attends in one call; whatever else is asked
    first, it is appended before.
    """

    is_croppable = True

    def __init__(self, capacity: int | None, window: int | None, dtype: DtypeName | None, number: int = 0) -> None:
        self.number, self.capacity, self.window = number, capacity, window
        self.dtype: DtypeName | None = dtype
        self.is_sliding = window is not None
        self.cache: KVCache | None = None
        self.waiting: tuple[torch.Tensor, torch.Tensor] | None = None

    def __repr__(self) -> str:
        return f"Layer(capacity={self.capacity}, window={self.window}, length={self.get_seq_length()})"

    def __deepcopy__(self, memo: Any) -> Layer:
        self.flush()
        new = copy.copy(self)
        new.cache = None if self.cache is None else self.cache.copy()
        return new

    # --- what transformers asks of a layer

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.cache is not None

    @property
    def batch_size(self) -> int:
        if self.cache is None:
            raise AttributeError("batch_size")  # transformers asks with hasattr()
        return self.cache.batch

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        return self._keep_all("keys")

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        return self._keep_all("values")

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Makes room, for tokens like these."""
        if key_states.dtype not in _DTYPES:
            raise UnsupportedError(f"key: expected float32, float64, float16 or bfloat16; got {key_states.dtype}.")
        batch, heads, _, head_dim = key_states.shape
        self.like = key_states.new_empty(0)
        self.cache = _Tokens(
            layers=1,
            batch=batch,
            kv_heads=heads,
            head_dim=head_dim,
            value_dim=value_states.shape[-1],
            capacity=self.capacity,
            dtype=self.dtype or _DTYPES[key_states.dtype],
            window=self.window,
            device="cpu" if key_states.device.type == "cpu" else key_states.device,
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **more: Any
    ) -> tuple[Kept, Kept]:
        """Takes tokens, and returns what attention_forward() knows them by."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise UnsupportedError(
                "key: expected a call under torch.no_grad(), as generate() is one: no gradient passes a Cache. To "
                "train, give use_cache=False."
            )
        if self.waiting is not None:
            self.flush()
        if self.cache is None:
            self._check_dtype(key_states)
            self.lazy_initialization(key_states, value_states)
        batch, heads, new, head_dim = key_states.shape
        self._check_alike(key_states, value_states)
        cache = self._require_cache()
        length = cache.lengths(0)[0]  # all sequences are as long
        total = length + new
        if total > cache.capacity:
            with _METHODS:
                new_totals(self.number, [length], [new], cache.capacity)
        seen, value_dim = self._count_shown(length) + new, value_states.shape[-1]
        self.waiting = given = key_states, value_states
        return (
            Kept.of(self, "keys", key_states, (batch, heads, seen, head_dim), total, given),
            Kept.of(self, "values", value_states, (batch, heads, seen, value_dim), total, given),
        )

    def get_seq_length(self) -> int:
        if self.cache is None:
            return 0
        return self.cache.length(0) + (0 if self.waiting is None else self.waiting[0].shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the keys that a chunk of so many queries is shown, and the position of the first."""
        length = self.get_seq_length()
        shown = self._count_shown(length)
        return shown + query_length, length - shown

    def _count_shown(self, length: int) -> int:
        """Returns how many of so many tokens the next one is shown."""
        return length if self.window is None else min(length, self.window - 1)

    def get_max_length(self) -> int:
        """Returns the capacity, -1 where there is no limit."""
        return -1 if self.capacity is None else self.capacity

    def reset(self) -> None:
        self.waiting = None
        if self.cache is not None:
            self.cache.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove tokens, as transformers counts them."""
        count = integer("tokens_to_remove", tokens_to_remove)
        if count > 0:
            raise ArgumentError(f"tokens_to_remove: expected a number up to 0, -2 for two; got {count}.")
        self.flush()
        if self.cache is None or not count:
            return
        try:
            self.cache.truncate(max(self.get_seq_length() + count, 0))
        except ArgumentError as error:  # of a window
            raise ArgumentError(
                f"tokens_to_remove: expected a number whose window is still there; got {count}, and a layer of "
                f"{self.window} tokens has forgotten some of it. Remove fewer, or reset() the cache."
            ) from error

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        with _BEAMS:
            self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        count = integer("repeats", repeats)
        if count < 1:
            raise ArgumentError(f"repeats: expected at least 1; got {count}.")
        if self.cache is not None:
            self._select([item for item in range(self.cache.batch) for _ in range(count)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        chosen = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        with _INDICES:
            self._select(chosen.tolist())

    def offload(self) -> None:
        raise UnsupportedError("offload: expected a Cache without offloading; its tokens stay where they are.")

    prefetch = offload

    # --- files

    def snapshot(self) -> tuple[saving.Saved, str] | None:
        """Copies the tokens, and names the dtype of the model's keys; None where there have been none."""
        self.flush()
        return None if self.cache is None else (saving.snapshot(self.cache), _DTYPES[self.like.dtype])

    def fill(self, path: Path, content: saving.Saved, keys: str, device: Any) -> None:
        """Takes over what snapshot() returned, of a file."""
        sizes = {n: content.sizes.get(n) for n in ("layers", "capacity", "window", "keep_first", "latent")}
        own = {"layers": 1, "capacity": self.capacity, "window": self.window, "keep_first": None, "latent": None}
        dtypes = {x: dtype for dtype, x in _DTYPES.items()}
        of_dtype = keys in dtypes and content.dtype == (self.dtype or keys)
        if sizes | {"keep_first": sizes["keep_first"] or None} != own or not of_dtype:
            raise FileError(
                f"{path}: damaged; expected a layer of {own} and {self.dtype or 'the dtype of its keys'}; got "
                f"{sizes} and {content.dtype}."
            )
        self.cache = saving.make_filled(path, content, lambda **x: _Tokens(**x, device=device))
        self.like = torch.empty(0, dtype=dtypes[keys], device=device)

    # --- what attention_forward() asks

    def attend_step(
        self, query: torch.Tensor, key: Kept, spec: MaskSpec, scale: float | None, softcap: float | None
    ) -> torch.Tensor | None:
        """Attends as attend_kept(), in a step of few tokens without other options; else returns None."""
        new, rows, cache, window = self.waiting, query.shape[2], self.cache, self.window
        if new is None or key.given is not new or cache is None or rows > _IN_PLACE or new[0].shape[2] != rows:
            return None
        if not _is_causal(spec, rows) or not (window is None or spec.pattern.left == window - 1):
            return None
        record = spec.step_record(window, scale, softcap)
        q = query.detach() if query.requires_grad else query
        self.waiting = None
        return cache.compute(0, q, *new, record).transpose(1, 2).contiguous()

    def attend_kept(self, query: torch.Tensor, key: Kept, mask: Any, options: dict[str, Any]) -> torch.Tensor | None:
        """Returns (batch, q_len, q_heads, value_dim), read from where tokens lie; None where copies have to do."""
        rows, new, window = query.shape[2], self.waiting, self.window
        if new is None or key.given is not new:
            self._check(key)
        spec = mask if type(mask) is MaskSpec else None
        if spec is None and mask is not None:
            return None
        if spec is not None and new is not None and new[0].shape[2] == rows and _is_causal(spec, rows):
            if window is not None and spec.pattern.left != window - 1:
                return None
            options = options | {"mask": spec.in_cache(window)}
            self.waiting = None
            return self._attend(query, new, options)
        if window is not None or (rows > 1 if spec is None else spec.looks_at_queries):
            return None
        self.flush()
        return self._attend(query, (None, None), options | {"mask": None if spec is None else spec.in_cache(None)})

    def _attend(self, query: torch.Tensor, new: tuple[Any, Any], options: dict[str, Any]) -> torch.Tensor:
        cache, (batch, heads, rows, _) = self._require_cache(), query.shape
        q = query.detach() if query.requires_grad else query
        if rows <= _IN_PLACE or cache.device != "cpu":
            return cache.attend(0, q, *new, **options).transpose(1, 2).contiguous()
        out = q.new_empty(batch, rows, heads, cache.value_dim)
        cache.attend(0, q, *new, out=out.transpose(1, 2), **options)
        return out

    def stored(self, kept: Kept) -> torch.Tensor:
        """Returns a copy of the tokens that a Kept stands for."""
        self._check(kept)
        found = getattr(self._require_cache(), kept.part)(0)
        if isinstance(found, np.ndarray):
            is_bf16 = found.dtype.name == "bfloat16"  # which PyTorch does not read from NumPy
            found = torch.from_numpy(found.view(np.int16)).view(torch.bfloat16) if is_bf16 else torch.from_numpy(found)
        past = found.to(kept.dtype)
        if self.waiting is not None:
            past = torch.cat([past, self.waiting[kept.part == "values"]], 2)
        if past.shape != kept.shape:
            raise ArgumentError(f"key: expected tokens that the window still has; got {kept!r}. Call update() once.")
        return past

    # ---

    def _require_cache(self) -> KVCache:
        assert self.cache is not None
        return self.cache

    def _keep_all(self, part: str) -> torch.Tensor | None:
        """Returns all tokens that are shown to the next."""
        if self.cache is None:
            return None
        self.flush()
        dim = self.cache.head_dim if part == "keys" else self.cache.value_dim
        shape = (self.cache.batch, self.cache.kv_heads, self.get_mask_sizes(0)[0], dim)
        return Kept.of(self, part, self.like, shape, self.get_seq_length())

    def _check(self, kept: Kept) -> None:
        if kept.length != self.get_seq_length():
            raise ArgumentError(
                f"key: expected what the last update() gave; the cache has {self.get_seq_length()} tokens by now, and "
                f"had {kept.length} then."
            )

    def _check_dtype(self, key: torch.Tensor) -> None:
        """Raises unless a cache of this dtype takes such keys."""
        kept = self.dtype or _DTYPES.get(self.like.dtype if self.cache is not None else key.dtype)
        coded = kept in CODES
        if coded and key.dtype == torch.float64:
            raise ArgumentTypeError(
                f"dtype: {code_cache(kept)} takes keys of float32, float16 or bfloat16; the model's are float64. "
                "Convert the model, or leave Cache(dtype=) out."
            )
        if not coded and kept != _DTYPES.get(key.dtype):
            raise ArgumentTypeError(
                f"dtype: this cache keeps {kept}, and the model's keys are {str(key.dtype).removeprefix('torch.')}. "
                f"Make a Cache without dtype=, which takes the model's, or convert the model: model.to(torch.{kept})."
            )

    def _check_alike(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Raises unless tokens are of as many sequences as those before, and of the same model."""
        cache, (batch, heads, _, head_dim) = self._require_cache(), key.shape
        if key.dtype is not self.like.dtype:
            self._check_dtype(key)
        if batch != cache.batch:
            raise ArgumentError(
                f"past_key_values: this cache holds {cache.batch} sequences; got {batch}. Make a new Cache, or give "
                "this one as many: batch_repeat_interleave(), batch_select_indices()."
            )
        if heads != cache.kv_heads or head_dim != cache.head_dim or value.shape[-1] != cache.value_dim:
            raise ArgumentError(
                f"past_key_values: this cache holds {cache.kv_heads} heads of {cache.head_dim} and {cache.value_dim} "
                f"dims; got {heads} of {head_dim} and {value.shape[-1]}, of another model. Make a Cache(model.config)."
            )

    def flush(self) -> None:
        """Stores tokens that nobody attended to."""
        if self.waiting is not None:
            new, self.waiting = self.waiting, None
            self._require_cache().append(0, *new)

    def _select(self, items: list[int]) -> None:
        self.flush()
        if self.cache is not None:
            self.cache = self.cache.select(items)


class Cache(theirs.DynamicCache):
    """KV cache for transformers whose layers are KVCaches: tokens are appended and read in place.

    Pass one as past_key_values, to a model or to generate(), with `attn_implementation="speedlight"`; any other
    implementation gets copies. Sliding layers are rings, whose memory does not grow; beams, crop() and assisted
    generation work; shapes never change. No gradient passes it.

    Args:
        config: of the model, which says what each layer is.
        capacity: most tokens of a sequence. Memory is reserved for so many and used as tokens come. Default what the
            model was made for, config.max_position_embeddings.
        dtype: "int8", "fp8" or "int4" keeps codes with scales for each token and head. Default that of keys and values.

    Raises:
        speedlight.Error: a kind of layer that is no attention. CacheFull: a sequence would pass the capacity.

    >>> from transformers import LlamaConfig
    >>> from speedlight.transformers import Cache
    >>> Cache(LlamaConfig(num_hidden_layers=2), capacity=128).get_max_length()
    128
    """

    @public(leaves_graph=False)
    def __init__(self, config: Any, *, capacity: int | None = None, dtype: Dtype | None = None) -> None:
        if not callable(getattr(config, "get_text_config", None)):
            raise ArgumentTypeError(f"config: expected model.config; got a {type(config).__name__}.")
        config = config.get_text_config(decoder=True)
        kinds, options = theirs.get_layer_types_and_kwargs(config)
        self._decodes = bool(getattr(config, "is_encoder_decoder", False))
        decoders = getattr(config, "num_decoder_layers", None)  # of T5's kin, whose num_hidden_layers is the encoder's
        if self._decodes and decoders is not None and len(set(kinds)) == 1:
            kinds, options = kinds[:1] * decoders, options[:1] * decoders
        room = _read_capacity(config) if capacity is None else capacity
        (room,) = checked_sizes({"capacity": room})
        kept = None if dtype is None else cache_dtype(dtype)
        layers = [_make_layer(n, *x, room, kept) for n, x in enumerate(zip(kinds, options, strict=True))]
        theirs.Cache.__init__(self, layers=layers)
        self._name = str(getattr(config, "name_or_path", "") or "")
        self._identity = _read_identity(config, kinds)
        self._capacity, self._dtype = room, kept

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **more: Any) -> Any:
        """Takes a layer's tokens, as its attention calls it."""
        if layer_idx >= len(self.layers):
            raise ArgumentError(
                f"config: expected that of the model; this cache was made for {len(self.layers)} layers, and the model "
                f"has a layer {layer_idx}. Make a Cache(model.config)."
            )
        if self._decodes:
            self._check_decoder(layer_idx)
        layer: Any = self.layers[layer_idx]
        return layer.update(key_states, value_states, *args, **more)

    # --- files

    def save(self, path: str | Path, *, model: str | None = None, tokens: Any = None) -> None:
        """Writes a .safetensors file, which load() reads on any device: a prompt that outlives the process.

        Only the user may read the file. It is written under a temporary name first, then renamed.

        Args:
            path: a name that ends in .safetensors.
            model: key of the model, such as its name and revision, or its adapter. Default config.name_or_path, unless
                that is empty. load() asks for the same, and for a config of the same sizes.
            tokens: input_ids of the tokens in the cache, (batch, length). load() then asks for input_ids that begin
                with them. Default None: other ids are not noticed.

        Raises:
            FileError: the file cannot be written; one of that name is as it was.
            CacheBusy: another thread appends.

        >>> import pathlib, tempfile, torch, speedlight.transformers
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> speedlight.transformers.register()
        >>> sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="speedlight")).eval()
        >>> cache = speedlight.transformers.Cache(model.config, capacity=64)
        >>> with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        ...     _ = model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
        ...     path, prompt = pathlib.Path(folder, "prompt.safetensors"), [[1, 2, 3]]
        ...     cache.save(path, model="tiny", tokens=prompt)
        ...     cache = speedlight.transformers.Cache.load(path, model.config, model="tiny", tokens=[[1, 2, 3, 4, 5]])
        >>> cache.get_seq_length()
        3
        """
        where, name = saving.checked_path(path), saving.check_model(model) or self._name
        if not name:
            raise ArgumentError(
                f"model: expected a key, since config.name_or_path is empty; got {model!r}. Give a name that tells the "
                "model's weights from others."
            )
        words = {"model": name, "config": json.dumps(self._identity), "capacity": str(self._capacity)}
        if self._dtype is not None:
            words["dtype"] = self._dtype
        contents = {}
        for n, layer in enumerate(self.layers):
            found = layer.snapshot() if isinstance(layer, Layer) else None
            if found is not None:
                contents[f"{n}."], words[f"{n}.keys"] = found
        lengths = {max(n) for x in contents.values() for n, _ in x.held} - {0}
        if len(lengths) > 1:
            raise CacheBusy(
                f"Cache: expected layers of as many tokens; got {sorted(lengths)}: another thread is appending, or an "
                "error has left a step half done. save() between two calls of the model, or crop() it first."
            )
        rows = None if tokens is None else token_rows(tokens)
        if rows is not None:
            length, batch = max(lengths, default=0), {x.sizes["batch"] for x in contents.values()} or {len(rows)}
            if {len(rows)} != batch:
                raise ArgumentError(f"tokens: expected those of {max(batch)} sequences; got {len(rows)}.")
            wrong = [len(x) for x in rows if len(x) != length]
            if wrong:
                way = f" generate() has not computed its last token: tokens[:, :{length}]." if wrong[0] > length else ""
                raise ArgumentError(
                    f"tokens: expected {length} ints of each sequence, as the cache has tokens; got {wrong[0]}.{way}"
                )
        saving.write_layers(where, contents, words, rows)

    @classmethod
    @public(leaves_graph=False)
    def load(
        cls, path: str | Path, config: Any, *, model: str | None = None, tokens: Any = None, device: Any = "cpu",
        capacity: int | None = None,
    ) -> Cache:  # fmt: skip
        """Reads what save() wrote, for a model of this config: generate() goes on with the same tokens.

        generate() takes input_ids that begin with the saved prompt and have more behind it, as with other caches.

        Args:
            path: a name that ends in .safetensors.
            config: of the model, of the sizes and the kinds of layers that it had.
            model: key of the model, as save() was given it. Default config.name_or_path.
            tokens: input_ids that begin with those that save() was given, (batch, length or more). None where it was
                given none.
            device: where the model lies.
            capacity: most tokens, where they are to be others than those of the cache that was saved.

        Raises:
            FileError: the file is missing, damaged, of another model or of other tokens.
        """
        where = saving.checked_path(path)
        file = saving.open_file(where, saving.LAYERS, device)
        words = file.words
        dtype = words.get("dtype")
        try:
            room, saved = int(words["capacity"]), dict(json.loads(words["config"]))
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            raise FileError(f"{where}: damaged; a word is missing or no number ({error}).") from None
        if not 1 <= room <= MOST or dtype not in (None, *_DTYPES.values(), *CODES):
            raise FileError(f"{where}: expected a capacity from 1 to 2^46 and a known dtype; got {room}, {dtype!r}.")
        new = cls(config, capacity=room if capacity is None else capacity, dtype=cast("DtypeName | None", dtype))
        saving.check_named(where, file, saving.check_model(model) or new._name)
        for name in sorted({*saved, *new._identity}):
            if saved.get(name) != new._identity.get(name):
                raise FileError(
                    f"{where}: expected tokens of a model whose {name} is {shown(new._identity.get(name))}, as config "
                    f"says; got {shown(saved.get(name))}. Give the config of the model that computed them, or compute "
                    "them anew."
                )
        count = saving.check_prompt(where, file, tokens)
        for n, layer in enumerate(new.layers):
            if isinstance(layer, Layer) and f"{n}.layers" in words:
                content = saving.read(where, file, f"{n}.")
                if "window" not in content.sizes:
                    content = saving.with_capacity(content, capacity)
                layer.fill(where, content, words.get(f"{n}.keys", ""), device)
        length = max([x.get_seq_length() for x in new.layers if isinstance(x, Layer)], default=0)
        if count not in (None, length):
            raise FileError(f"{where}: damaged; it has {count} tokens, and keys of {length}.")
        return new

    def _check_decoder(self, n: int) -> None:
        """Raises where a layer has more tokens than the next: it takes a second part of a call, the encoder's keys."""
        lengths = [x.get_seq_length() for x in self.layers[n : n + 2] if isinstance(x, Layer)]
        if len(lengths) == 2 and lengths[0] > lengths[1]:
            raise UnsupportedError(
                "past_key_values: an encoder-decoder keeps keys of two kinds; expected transformers' "
                "EncoderDecoderCache(Cache(config), DynamicCache()); got a Cache alone, or one that an error has "
                "left half full: make a new one."
            )

    def __repr__(self) -> str:
        return f"Cache({self.layers})"


def _is_causal(spec: MaskSpec, rows: int) -> bool:
    """Returns whether a query sees no key after it; the last token has none."""
    return spec.pattern.causal or (rows == 1 and spec.pattern.right is None)


def _read_identity(config: Any, kinds: Sequence[str]) -> dict[str, Any]:
    """Returns what identifies the model of a config, as JSON has it."""
    found = {name: getattr(config, name, None) for name in _IDENTITY} | {"layer_types": list(kinds)}
    return json.loads(json.dumps({name: x for name, x in found.items() if x is not None}, sort_keys=True, default=str))


def _make_layer(n: int, kind: str, options: dict[str, Any], capacity: int, dtype: DtypeName | None) -> Any:
    match kind:
        case "full_attention" | "chunked_attention":
            return Layer(capacity, None, dtype, n)
        case "sliding_attention":
            return Layer(capacity, options["sliding_window"], dtype, n)
        case "dummy":
            return theirs.DummyLayer()
    raise UnsupportedError(
        f"config: expected layers of full, sliding or chunked attention; got one of {kind!r}. Leave past_key_values "
        "out: speedlight reads the keys and values of transformers' own caches, too."
    )


def _read_capacity(config: Any) -> int:
    for name in ("max_position_embeddings", "max_target_positions", "n_positions"):
        found = getattr(config, name, None)
        if isinstance(found, int) and found > 0:
            return found
    raise ArgumentError("capacity: expected a number of tokens, as the config names no most; got None.")
