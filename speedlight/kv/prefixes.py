"""Tokens of sequences, page by page, and the digests by which a pool finds pages of equal prefixes."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from typing import Any, NamedTuple

from ..arrays.array import listed
from ..arrays.integers import is_one, whole
from ..errors import ArgumentError, ArgumentTypeError, shown

_CODE = "q"  # tokens are kept as int64
_BYTES = array(_CODE).itemsize
_NO_EXTRA = b"None"
_EXTRA = "a str, bytes, an int of 64 bits, or a tuple of these"


def digest_of(parent: bytes, tokens: bytes) -> bytes:
    """Returns the digest of a page: of its parent's digest and its own tokens."""
    return hashlib.sha256(parent + tokens).digest()


class PageTokens:
    """Tokens of a full page; its parents have the tokens before them, and the root has the `extra` key.

    tokens: int64 numbers as bytes; of the root the encoded key.
    parent: tokens of the page before; None of the root.
    depth: number of pages from the first to this one; 0 of the root.
    generation: PageJournal.generation when the root was made.
    """

    __slots__ = ("depth", "digest", "generation", "parent", "tokens")

    def __init__(self, tokens: bytes, parent: PageTokens | None, generation: object) -> None:
        self.tokens = tokens
        self.parent = parent
        self.generation = generation
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.digest = digest_of(b"" if parent is None else parent.digest, tokens)

    def with_page(self, tokens: bytes) -> PageTokens:
        """Returns the tokens of the next page."""
        return PageTokens(tokens, self, self.generation)


def is_same_prefix(one: PageTokens | None, other: PageTokens | None, known: set[int]) -> bool:
    """Compares two prefixes of as many pages token by token, back to where they are one object.

    known: ids of pages that the other prefix is known to have, to which those of `one` are added.
    """
    found = set[int]()
    if one is not None and other is not None and one.depth != other.depth:
        return False
    while one is not other and id(one) not in known:
        if one is None or other is None or one.tokens != other.tokens:
            return False
        found.add(id(one))
        one, other = one.parent, other.parent
    known |= found
    return True


class SequenceTokens(NamedTuple):
    """Tokens of a sequence from its first one on, as far as calls gave them; immutable.

    last: its last full page of tokens, or the root.
    rest: tokens behind that, fewer than a page, as bytes.
    offered: number of its pages that were offered to the index.
    page_size: tokens of a page.
    extra: the caller's key.
    ahead: tokens of the prompt that sequence() looked up, behind those of the sequence, as bytes.
    """

    last: PageTokens
    rest: bytes
    offered: int
    page_size: int
    extra: Any
    ahead: bytes = b""

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.last.depth * self.page_size + len(self.rest) // _BYTES

    def pages(self, start: int, stop: int) -> list[PageTokens]:
        """Returns the tokens of full pages, from one index to another."""
        found, page = [], self.last
        while page.depth > start and page.parent is not None:
            if page.depth <= stop:
                found.append(page)
            page = page.parent
        return found[::-1]

    def between(self, start: int, stop: int) -> bytes:
        """Returns the tokens from one position to another, as bytes."""
        first = start // self.page_size
        joined = b"".join([x.tokens for x in self.pages(first, self.last.depth)]) + self.rest
        skipped = min(first, self.last.depth) * self.page_size
        return joined[(start - skipped) * _BYTES : (stop - skipped) * _BYTES]

    def numbers(self) -> list[int]:
        """Returns all tokens as ints."""
        return array(_CODE, self.between(0, self.length)).tolist()

    def extended(self, index: int, start: int, new: bytes) -> SequenceTokens:
        """Returns the tokens with those of a call's rows from position `start` on; `index`: the sequence's, for errors.

        Positions whose tokens are known must get the same ones.
        """
        known = self.length - start
        if known < 0:
            raise ArgumentError(
                f"tokens: expected None, since no call gave the tokens of sequence {index} from position {self.length} "
                f"on; got tokens from {start} on. Give tokens= from a sequence's first append on, or never."
            )
        common = min(known * _BYTES, len(new))
        before = self.between(start, start + common // _BYTES) if common > 0 else b""
        if before != new[:common]:
            at, one, other = _difference(before, new[:common])
            raise ArgumentError(
                f"tokens: expected {one} at position {start + at} of sequence {index}, as given for another layer; got "
                f"{other}. Give equal tokens in each layer, or tokens in the first layer alone."
            )
        fresh = new[common:]
        asked = min(len(self.ahead), len(fresh))
        if fresh[:asked] != self.ahead[:asked]:
            at, one, other = _difference(self.ahead[:asked], fresh[:asked])
            raise ArgumentError(
                f"tokens: expected {one} at position {self.length + at} of sequence {index}, as the prompt has that "
                f"sequence() looked up; got {other}. Append what follows length(): prompt[sequence.length():]."
            )
        last, rest, size = self.last, self.rest + fresh, self.page_size * _BYTES
        full = len(rest) - len(rest) % size
        for at in range(0, full, size):
            last = last.with_page(rest[at : at + size])
        return self._replace(last=last, rest=rest[full:], ahead=self.ahead[asked:])

    def expecting(self, prompt: bytes) -> SequenceTokens:
        """Returns the same tokens, behind which those of a prompt are to follow."""
        return self._replace(ahead=prompt[self.length * _BYTES :])

    def cut(self, length: int) -> SequenceTokens:
        """Returns the first tokens."""
        if length >= self.length:
            return self
        pages = length // self.page_size
        rest = self.between(pages * self.page_size, length)
        last = self.last
        while last.depth > pages and last.parent is not None:
            last = last.parent
        return self._replace(last=last, rest=rest, offered=min(self.offered, pages), ahead=b"")

    def along(self, start: int, path: list[int]) -> SequenceTokens:
        """Returns those before `start`, and those at these indices from there on."""
        behind = self.between(start, self.length)
        left = b"".join([behind[at * _BYTES : (at + 1) * _BYTES] for at in path])
        return self.cut(start).extended(0, min(start, self.length), left)


def _difference(one: bytes, other: bytes) -> tuple[int, int, int]:
    """Returns where tokens differ first, and those."""
    pairs = [*zip(array(_CODE, one), array(_CODE, other), strict=True)]
    at = [a == b for a, b in pairs].index(False)
    return (at, *pairs[at])


def no_tokens(extra: Any, page_size: int, generation: object) -> SequenceTokens:
    """Returns the tokens of a new sequence: none, under a key, which is checked."""
    return SequenceTokens(PageTokens(encode_extra(extra), None, generation), b"", 0, page_size, extra)


def encode_extra(extra: Any) -> bytes:
    """Encodes a caller's key; the codes of different keys differ."""
    if extra is None:
        return _NO_EXTRA
    if type(extra) is tuple:
        parts = [_encoded_part(part, f"extra[{n}]") for n, part in enumerate(extra)]
        return f"({','.join(parts)})".encode()
    return _encoded_part(extra, "extra").encode()


def _encoded_part(part: Any, place: str) -> str:
    """Encodes a str, bytes or an int as a letter and digits. `place`: how a caller would write it."""
    kind = type(part)
    if kind is str:
        return "s" + part.encode("utf-8", "surrogatepass").hex()
    if kind is bytes:
        return "b" + part.hex()
    if kind is not int:
        exact = "str" if whole(part) is None else "int"
        if kind is list and place == "extra":
            exact = "tuple"
        raise ArgumentTypeError(f"extra: expected {_EXTRA}; got {kind.__name__}. Write {exact}({place}).")
    if part.bit_length() > 64:  # Python may refuse to print it
        raise ArgumentError(f"extra: expected {_EXTRA}; got an int of {part.bit_length()} bits.")
    return f"i{part}"


def decode_extra(code: bytes) -> Any:
    """Decodes the result of encode_extra(); raises ValueError for other bytes."""
    text = code.decode("ascii")
    if text.startswith("("):
        inner = text[1:-1]
        extra: Any = tuple([_decoded_part(part) for part in inner.split(",")]) if inner else ()
    else:
        extra = None if code == _NO_EXTRA else _decoded_part(text)
    # int() and bytes.fromhex() read more than is ever written
    if encode_extra(extra) != code:
        raise ValueError(f"{text[:40]!r} is no key")
    return extra


def _decoded_part(text: str) -> str | bytes | int:
    """Decodes the result of _encoded_part()."""
    kind, digits = text[:1], text[1:]
    if kind == "i":
        return int(digits)
    part = bytes.fromhex(digits)
    return part if kind == "b" else part.decode("utf-8", "surrogatepass")


def _number(x: Any, what: str) -> int:
    """Returns a token that is a whole number of any library, or raises."""
    number = whole(x)
    if number is None:
        way = ""
        if isinstance(x, (str, bytes)):
            way = " Give the numbers that the tokenizer makes of them."
        elif hasattr(x, "__len__"):
            way = " Give those of all sequences in one list: tokens.reshape(-1)."
        raise ArgumentTypeError(f"tokens: expected {what}; got {type(x).__name__} among them.{way}")
    return number


def token_bytes(tokens: Any, rows: int | None, each: str = "row of k") -> bytes:
    """Returns the tokens of a call as int64 numbers; `rows`: how many there should be, None of a prompt."""
    what = "ints" if rows is None else f"{rows} ints, one for each {each}"
    return _encoded_tokens(_listed_tokens(tokens, rows, what, has_none=False))


def token_bytes_of_rows(tokens: Any, counts: list[int]) -> list[bytes | None]:
    """Returns the tokens of a call's rows as int64 numbers, for each sequence; None where all entries are None.

    counts: rows of each sequence.
    """
    rows = sum(counts)
    numbers = _listed_tokens(tokens, rows, f"{rows} ints, one for each row of k", has_none=True)
    ends = [*itertools.accumulate(counts, initial=0)]
    if type(None) not in set(map(type, numbers)):
        joined = _encoded_tokens(numbers)
        return [joined[start * _BYTES : end * _BYTES] for start, end in itertools.pairwise(ends)]
    found: list[bytes | None] = []
    for index, (start, end) in enumerate(itertools.pairwise(ends)):
        own = numbers[start:end]
        missing = len([x for x in own if x is None])
        if 0 < missing < len(own):
            raise ArgumentError(
                f"tokens: expected ints for all {len(own)} rows of sequence {index}, or None for all; got {missing} "
                "None among them."
            )
        found.append(None if missing else _encoded_tokens(own))
    return found


def token_rows(tokens: Any) -> list[list[int]]:
    """Returns the tokens of a batch as ints, a list for each sequence."""
    what = "a list of ints for each sequence, as input_ids are"
    rows = listed(tokens, "tokens", what)
    if rows and all([is_one(x) for x in rows]):
        raise ArgumentError(f"tokens: expected {what}; got one list of ints. Of one sequence write [tokens].")
    return [array(_CODE, token_bytes(row, None)).tolist() for row in rows]


def _listed_tokens(tokens: Any, rows: int | None, what: str, *, has_none: bool) -> list[Any]:
    """Returns tokens as ints, as many as `rows`. `what`: the words for them; `has_none`: None may be among them."""
    numbers = listed(tokens, "tokens", what)
    if set(map(type, numbers)) - {int}:
        numbers = [None if has_none and x is None else _number(x, what) for x in numbers]
    if rows is not None and len(numbers) != rows:
        way = " Leave out tokens that are stored already." if len(numbers) > rows else ""
        raise ArgumentError(f"tokens: expected {what}; got {len(numbers)}.{way}")
    return numbers


def _encoded_tokens(numbers: list[int]) -> bytes:
    """Returns tokens as int64 numbers, or raises for wider ones."""
    try:
        return array(_CODE, numbers).tobytes()
    except OverflowError:
        most = max(numbers, key=abs)
        raise ArgumentError(f"tokens: expected ints of 64 bits; got {shown(most)} among them.") from None


def kept_tokens(
    before: SequenceTokens | None, start: int, path: list[int], tokens: Any, page_size: int, generation: object
) -> SequenceTokens | None:
    """Returns the tokens that keep() leaves; `tokens`: those of the path, as the caller has them, or None."""
    if tokens is None:
        return None if before is None else before.along(start, path)
    new = token_bytes(tokens, len(path), "index")
    return (before or no_tokens(None, page_size, generation)).cut(start).extended(0, start, new)


def with_tokens(records: list[Any], starts: list[int], tokens: list[bytes | None], empty: SequenceTokens) -> list[Any]:
    """Returns records of sequences with a call's tokens, which token_bytes_of_rows() makes.

    empty: tokens of a sequence that had none yet.
    """
    longer = []
    for index, (record, start, new) in enumerate(zip(records, starts, tokens, strict=True)):
        before = record.tokens or empty
        longer.append(record._replace(tokens=before.extended(index, start, new)) if new else record)
    return longer
