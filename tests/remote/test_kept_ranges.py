"""Which ranges stay: laws of the policy, for any sequence of ranges."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from energon_lite.extras.remote.kept_ranges import KeptRanges, Range

SOURCES = {"s3://b/rare": 1e9, "s3://b/often": 10.0, "s3://b/often/inner": 1e6}
ADDRESSES = [*(f"{name}/x.tar" for name in SOURCES), "s3://c/unknown.tar"]


def range_of(address: str, number: int, size: int = 10) -> Range:
    return Range(Path(address), address, number, number + size, size)


def after(address: str) -> float:
    """When an address returns, found in another way than by the policy."""
    above = [name for name in SOURCES if address.startswith(f"{name}/")]
    return SOURCES[max(above, key=len)] if above else float("inf")


@given(
    drawn=st.lists(st.tuples(st.sampled_from(ADDRESSES), st.integers(1, 30)), max_size=60),
    max_bytes=st.integers(30, 200),
    staged=st.none() | st.integers(0, 300),
)
def test_what_stays_is_staged_or_returns_soonest(drawn: Any, max_bytes: int, staged: Any) -> None:
    gone: list[Range] = []
    kept = KeptRanges(max_bytes, gone.append)
    kept.staged_bytes = staged
    kept.expect(SOURCES)
    here, latest = list[Range](), list[Range]()
    limit = min(max_bytes if staged is None else staged, max_bytes)
    for number, (address, size) in enumerate(drawn):
        here.append(range_of(address, 100 * number, size))
        latest.append(here[-1])
        num_gone = len(gone)
        kept.add(here[-1])
        while sum(own.num_bytes for own in latest) > limit:
            latest.pop(0)
        for own in gone[num_gone:]:
            assert own not in latest
            here.remove(own)
            # Nothing that stays beyond the staged ranges returns later, or came later from there.
            rest = [other for other in here if other not in latest]
            assert all(after(other.address) <= after(own.address) for other in rest)
        assert sum(own.num_bytes for own in here) <= max_bytes
    assert Counter(here) + Counter(gone) == Counter(
        range_of(address, 100 * number, size) for number, (address, size) in enumerate(drawn)
    )
