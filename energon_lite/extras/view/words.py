"""Numbers of things and of bytes, as words."""

from __future__ import annotations


def counted(count: int, what: str) -> str:
    """Writes a number of things: 1 shard, 2,000 shards."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def size_text(size: float, digits: int = 2) -> str:
    """Writes a number of bytes with its unit.

    Args:
        size: the number.
        digits: behind the point, of kibibytes and more.
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:.{digits}f} {unit}"
        size /= 1024
    return f"{size:.{digits}f} TiB"
