"""Numbers of things and of bytes, and shares of a blend, as words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_MAX_SHARES = 4  # of a schedule with more the ends are written


def counted(count: int, what: str) -> str:
    """Writes a number of things: 1 shard, 2,000 shards."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def array_text(value: Any) -> str:
    """Writes shape and dtype of a tensor or array, and a device that is not the CPU."""
    device = str(getattr(value, "device", "cpu"))
    dtype = str(value.dtype).removeprefix("torch.")
    where = "" if device == "cpu" else f" on {device}"
    return f"{shape_text(value.shape)} {dtype[:60]}{where}".strip()


def shape_text(shape: Iterable[int]) -> str:
    """Writes a shape: 3 x 1,024."""
    return " x ".join(f"{size:,}" for size in shape)


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


def first_of(texts: Sequence[str], most: int, what: str = "") -> list[str]:
    """Returns the first of several texts; in place of the others one as "and 3 more"."""
    rest = len(texts) - most
    return [*texts[:most], *([f"and {rest:,} more{what}"] if rest > 0 else [])]


def error_text(error: Exception) -> str:
    """Writes an error with its notes, a line each."""
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def share_text(shares: Sequence[float], places: Sequence[float]) -> str:
    """Writes the share of a source in a blend: 75.0 %, or 50.0 % → 10.0 % over 1,000 samples.

    Args:
        shares: one for each place, in 0..1.
        places: draws of the run, ascending, at which a schedule has a point.
    """
    edges = [i for i, share in enumerate(shares) if not i or abs(share - shares[i - 1]) > 1e-9]
    # Some of a thousand sources have a share of 0.0002 %.
    texts = [f"{100 * s:.1f} %" if s > 5e-4 or not s else f"{100 * s:.1g} %" for s in shares]
    texts = [texts[edge] for edge in edges]
    if len(texts) > _MAX_SHARES:
        texts[_MAX_SHARES - 2 : -1] = ["..."]
    over = f" over {places[edges[-1]]:,.0f} samples" if len(edges) > 1 else ""
    return f"{' → '.join(texts)}{over}"
