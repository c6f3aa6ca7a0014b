"""Page-locked host memory as torch hands it out: in powers of two (c10 CachingHostAllocator)."""

from __future__ import annotations

# Of a block that is kept in pieces no more than this part is rounding, or so many bytes.
_WASTE, _LITTLE = 1 / 32, 2**16


def pinned_bytes(size: float) -> int:
    """What a pinned block of `size` bytes takes: the next power of two."""
    return 1 << (max(1, int(size)) - 1).bit_length()


def pieces(size: int) -> list[int]:
    """Bytes of the pieces in which to keep a block of so many bytes: a block of 2.4e9 would take 4.3e9, its pieces take 2.4e9.

    Powers of two, the largest first, and a rest that may be rounded up. A block that is a power of two, or a little less, is one piece.
    """
    found: list[int] = []
    rest, spare = size, max(_LITTLE, int(size * _WASTE))
    while rest > 0:
        whole = pinned_bytes(rest)
        piece = rest if whole - rest <= spare else whole // 2
        found.append(piece)
        rest -= piece
    return found
