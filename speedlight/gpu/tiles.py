"""The table of tiles: rows and keys of a block, warps and stages, by compute capability, dtype and head dim. Nothing
else.

Never by length or batch: the order of sums, and so the bits of a row, would change with them. Made by `speedlight tune`
on the device; rows that say `measured=False` were chosen by what compiles without spills and by published kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Tile:
    """One way to compile the attention kernel."""

    rows: int  # of queries
    keys: int
    warps: int
    stages: int
    use_tma: bool = False  # keys and values come by tensor descriptors (from capability 9.0)
    registers: int | None = None  # of a thread, at most; said where ptxas would rather spill a few than fit one block
    # where lengths are multiples of the tile: half as many warps compute, a group of others loads keys for them, and
    # Triton gives registers out
    producer: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: the tile for head dims up to `head_dim`."""

    head_dim: int
    full: Tile  # every query sees every key
    masked: Tile  # masks, scores, and causality where `causal` says nothing of it
    paged: Tile  # pages and codes
    decode: Tile
    causal: Tile | None = None  # causality alone, without dropout
    measured: bool = False


def _roomy(row: Row) -> Row:
    full, masked, paged, decode = (replace(x, registers=255) for x in (row.full, row.masked, row.paged, row.decode))
    return replace(row, full=full, masked=masked, paged=paged, decode=decode)


# wide tiles of Hopper's, of head dims up to 64 and up to 128
_WIDE = Tile(128, 128, 8, 3, True, producer=True), Tile(128, 128, 8, 2, True, producer=True)

# capability: dtype: rows in ascending head dim
#             full: rows keys warps stages       masked                         paged                    decode (causal)
TABLE: dict[tuple[int, int], dict[str, tuple[Row, ...]]] = {
    (8, 0): {
        "16": (
            Row(64, Tile(128, 128, 8, 3), Tile(64, 64, 8, 3), Tile(128, 64, 8, 3), Tile(16, 64, 4, 3)),
            Row(128, Tile(128, 32, 8, 3), Tile(64, 64, 8, 2), Tile(128, 64, 8, 3), Tile(16, 64, 4, 2, registers=255)),
            Row(256, Tile(64, 32, 8, 2), Tile(64, 32, 8, 1), Tile(64, 32, 8, 2), Tile(16, 64, 8, 2)),
            Row(512, Tile(32, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 2), Tile(16, 16, 4, 2)),
        ),
        "32": (
            Row(64, Tile(64, 32, 8, 2), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2), Tile(16, 64, 4, 2)),
            Row(128, Tile(32, 64, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 32, 8, 2)),
            Row(256, Tile(32, 32, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 2)),
            Row(512, Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
        ),
        "tf32": (
            Row(64, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(16, 64, 4, 3)),
            Row(128, Tile(16, 32, 8, 1), Tile(16, 32, 8, 1), Tile(16, 32, 8, 1), Tile(16, 32, 4, 3)),
        ),
    },
    (9, 0): {
        "16": (
            Row(64, _WIDE[0], Tile(128, 64, 8, 3, True), Tile(128, 64, 8, 3), Tile(16, 64, 4, 3), _WIDE[0]),
            Row(128, _WIDE[1], Tile(128, 64, 8, 3, True), Tile(128, 64, 8, 3), Tile(16, 64, 4, 3), _WIDE[1]),
            Row(256, Tile(128, 32, 8, 2, True), Tile(64, 64, 8, 2, True), Tile(32, 32, 8, 2), Tile(16, 64, 8, 2)),
            Row(
                512,
                Tile(32, 32, 8, 2, True),
                Tile(32, 32, 8, 2, True),
                Tile(32, 32, 8, 2),
                Tile(16, 16, 4, 2, registers=255),
            ),
        ),
        "32": (
            Row(64, Tile(64, 32, 8, 2), Tile(32, 64, 8, 2), Tile(32, 32, 8, 2), Tile(16, 32, 4, 3)),
            Row(128, Tile(32, 64, 8, 1), Tile(16, 32, 8, 1), Tile(16, 32, 8, 1), Tile(16, 32, 8, 2)),
            Row(256, Tile(16, 32, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 2)),
            Row(512, Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
        ),
        "tf32": (
            Row(64, Tile(128, 32, 8, 2), Tile(128, 32, 8, 2), Tile(128, 32, 8, 2), Tile(16, 32, 4, 3)),
            Row(128, Tile(16, 64, 8, 1), Tile(16, 64, 8, 1), Tile(16, 32, 8, 1), Tile(16, 32, 8, 2)),
        ),
    },
}
TABLE[8, 0] |= {kind: tuple(map(_roomy, TABLE[8, 0][kind])) for kind in ("32", "tf32")}
TABLE[9, 0] |= {kind: (TABLE[9, 0][kind][0], *map(_roomy, TABLE[9, 0][kind][1:])) for kind in ("32", "tf32")}
TABLE[10, 0] = TABLE[9, 0] | {
    "16": (
        Row(64, Tile(128, 64, 8, 3, True), Tile(128, 64, 8, 3, True), Tile(64, 64, 8, 1), Tile(16, 64, 4, 3)),
        Row(128, Tile(128, 64, 8, 3, True), Tile(64, 64, 8, 2, True), Tile(64, 64, 8, 3), Tile(16, 64, 4, 3)),
        Row(256, Tile(128, 32, 8, 2, True), Tile(64, 32, 8, 1, True), Tile(64, 32, 8, 2), Tile(16, 64, 8, 2)),
        TABLE[9, 0]["16"][3],
    ),
    "32": tuple(map(_roomy, TABLE[9, 0]["32"])),
    "tf32": (
        Row(64, Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), Tile(16, 32, 4, 3)),
        TABLE[9, 0]["tf32"][1],
    ),
}
TABLE[7, 5] = {
    kind: tuple(
        Row(d, x, x, x, y)
        for d, x, y in (
            (64, Tile(64, 32, 4, 2), Tile(16, 32, 4, 2)),
            (128, Tile(64, 32, 4, 1), Tile(16, 32, 4, 1)),
            (256, Tile(32, 16, 4, 1), Tile(16, 16, 4, 1)),
            (512, Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
        )
    )
    for kind in ("16", "32")
}
# float32 by tensor cores: above, operands do not fit the registers, and IEEE products are taken
COARSE_DIMS = 128
HEAD_DIMS = 512  # the most


def table_row(capability: tuple[int, int], dtype: str, head_dim: int, precision: str = "ieee") -> Row:
    """The row for the larger of head dim and value dim; of the newest capability in the table that the device has."""
    of_kinds = TABLE[max([c for c in TABLE if c <= capability], default=min(TABLE))]
    kind = "16" if dtype != "float32" else "32" if precision == "ieee" or "tf32" not in of_kinds else "tf32"
    rows = of_kinds[kind]
    return rows[sum([row.head_dim < head_dim for row in rows])]  # in ascending head dim


@dataclass(frozen=True, slots=True)
class GradientRow:
    """The tiles of the backward kernel for head dims up to `head_dim`."""

    head_dim: int
    queries: Tile  # a program owns so many rows, for dQ
    keys: Tile  # a program owns so many keys, for dK and dV
    measured: bool = False


# by compiler evidence alone; programs that own keys keep two sums, and take fewer queries at once
GRADIENTS: dict[str, tuple[GradientRow, ...]] = {
    "16": (
        GradientRow(64, Tile(64, 64, 8, 2), Tile(32, 128, 8, 2)),
        GradientRow(128, Tile(64, 64, 8, 2, registers=255), Tile(32, 64, 8, 2, registers=255)),
        GradientRow(256, Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
        GradientRow(512, Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ),
    "32": (
        GradientRow(64, Tile(32, 32, 8, 1, registers=255), Tile(32, 32, 8, 1, registers=255)),
        GradientRow(128, Tile(16, 32, 8, 1, registers=255), Tile(16, 32, 8, 1, registers=255)),
        GradientRow(512, Tile(16, 16, 8, 1, registers=255), Tile(16, 16, 8, 1, registers=255)),
    ),
    "tf32": (
        GradientRow(64, Tile(32, 32, 8, 1, registers=255), Tile(32, 32, 8, 1, registers=255)),
        GradientRow(128, Tile(16, 16, 8, 1, registers=255), Tile(16, 16, 8, 1, registers=255)),
    ),
}


# for 16 bits without mask, score and dropout, by capability: products as wide as fit the registers
PLAIN_GRADIENTS: dict[tuple[int, int], tuple[GradientRow, ...]] = {
    (8, 0): (
        GradientRow(64, Tile(128, 64, 8, 2), Tile(32, 128, 8, 2)),
        GradientRow(128, Tile(64, 64, 8, 2, registers=255), Tile(64, 64, 8, 2, registers=255)),
    ),
    (9, 0): (
        GradientRow(64, Tile(128, 64, 8, 2), Tile(64, 128, 8, 2, registers=255)),
        GradientRow(128, Tile(128, 64, 8, 2, registers=255), Tile(32, 128, 8, 2, registers=255)),
    ),
    (10, 0): (
        GradientRow(64, Tile(128, 64, 8, 2), Tile(64, 128, 8, 2, registers=255)),
        GradientRow(128, Tile(128, 64, 8, 2, registers=255), Tile(64, 64, 8, 2, registers=255)),
    ),
}


def gradient_row(
    capability: tuple[int, int], dtype: str, head_dim: int, precision: str = "ieee", *, is_plain: bool = False
) -> GradientRow:
    """The row for the larger of head dim and value dim; is_plain: no mask, score or dropout."""
    kind = "16" if dtype != "float32" else "32" if precision == "ieee" else "tf32"
    rows = GRADIENTS[kind]
    known = [c for c in PLAIN_GRADIENTS if c <= capability]
    if is_plain and kind == "16" and known and head_dim <= PLAIN_GRADIENTS[max(known)][-1].head_dim:
        rows = PLAIN_GRADIENTS[max(known)]
    return rows[sum([row.head_dim < head_dim for row in rows])]
