"""What a cache over epochs saves, beside the best that any cache of its size could."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.remote.policies import belady, first_stays, lru
from benchmarks.remote.runs import WINDOW, cache_of, is_data, open_run, served, write_samples
from benchmarks.scale.rows import Row, print_rows
from benchmarks.scale.runs import open_loader, write_blend
from energon_lite import SavableDataLoader
from energon_lite.extras.remote import staging
from energon_lite.sources import reading

BATCH = 16
Draw = tuple[str, Hashable]


def run(
    path: Path, what: str, num_draws: int, part: float, record_bytes: int, window: int = WINDOW
) -> Iterator[Row]:
    """Draws samples through a cache of a part of all bytes; yields fetched over used.

    The shares of the policies are computed from the samples that were drawn. What was read ahead
    beyond the last draw counts as fetched. One stream, as each needs a part of the cache.
    """
    folder = path if path.is_dir() else path.parent
    total = sum(tar.stat().st_size for tar in folder.rglob("*.tar"))
    with served(path.parent, latency_ms=0, bytes_per_sec=0) as server:
        config = {"num_streams": 1, **cache_of(int(part * total))}
        with open_run(f"s3://bucket/{path.name}", window=window, **config) as loader:
            draws = draws_of(loader, num_draws)
            log = server.log()
    fetched = sum(entry.num_bytes for entry in log if is_data(entry)) / record_bytes
    size = f"{what}: cache of {part:.0%}"
    yield "fetched over used", size, fetched / len(draws), "x"
    yield from compared(draws, fetched, part * total / record_bytes, size)


def draws_of(loader: SavableDataLoader[Any], number: int) -> list[Draw]:
    """Returns the samples of a run: the name of their dataset, and their keys."""
    return [
        (Path(sources[0].dataset_path).name, key)
        for batch in islice(loader, number // BATCH)
        for key, sources in zip(batch.__key__, batch.__sources__, strict=True)
    ]


def compared(draws: list[Draw], fetched: float, capacity: float, size: str) -> Iterator[Row]:
    """Yields what other policies fetch with a cache of a number of samples."""
    policies: tuple[Callable[[Sequence[Hashable], int], int], ...] = belady, lru, first_stays
    for policy in policies:
        yield f"{policy.__name__} off-line", size, policy(draws, int(capacity)) / len(draws), "x"
    yield "over Belady's bound", size, fetched / belady(draws, int(capacity)), "x"


def simulated(draws: list[Draw], sizes: dict[str, int], part: float) -> Iterator[Row]:
    """Yields what our policy fetches of draws, where nothing is read ahead."""
    from energon_lite.extras.remote.kept_ranges import KeptRanges, Range

    held, capacity = set[Draw](), int(part * sum(sizes.values()))
    kept = KeptRanges(capacity, lambda range_: held.remove((range_.address, range_.start)))
    kept.staged_bytes = 0
    kept.expect({name: float(size) for name, size in sizes.items()})  # all shares are equal
    kept.source_of = lambda address: address  # type: ignore[method-assign]
    fetched = 0
    for draw in draws:
        if draw not in held:
            fetched += 1
            held.add(draw)
            kept.add(Range(Path(), draw[0], draw[1], draw[1], 1))  # type: ignore[arg-type]
    numbers = f"{min(sizes.values())} to {max(sizes.values())}"
    size = f"ten sources of {numbers} samples: simulated cache of {part:.0%}"
    yield "fetched over used", size, fetched / len(draws), "x"
    yield from compared(draws, fetched, capacity, size)


def blend_of(root: Path, scale: int, num_bytes: int) -> tuple[Path, dict[str, int]]:
    """Writes a blend of ten sources, the next twice as large; returns it, and their sizes."""
    numbers = [400 * 2**number // scale for number in range(10)]
    folders = [write_samples(root, number, num_bytes, 2) for number in numbers]
    members = [{"path": f"./{folder.name}"} for folder in folders]
    sizes = {folder.name: number for folder, number in zip(folders, numbers, strict=True)}
    return write_blend(root / "blend.yaml", members), sizes


@contextmanager
def read_ahead_divided(by: int) -> Iterator[None]:
    """Divides the bytes that a stream reads at a time and ahead, which are part of each cache."""
    ahead = (staging, "_AHEAD_BYTES"), (reading, "_AHEAD_BYTES")
    with ExitStack() as stack:
        for module, name in (*ahead, (reading, "_MOST_BYTES"), (reading, "_BYTES")):
            stack.enter_context(patch.object(module, name, getattr(module, name) // by))
        yield


def blends(folder: Path, large: bool = False) -> Iterator[Row]:
    """Yields the rows of ten sources that are fetched: those of 400 to 205 000 samples, divided.

    Samples of 33 KB are exact ranges, so that each of them is kept or not, as off-line. What a
    stream reads ahead and its shuffle window are divided by the same number, so that they have the
    same part of the cache as with all samples.
    """
    scale = 10 if large else 20
    blend, sizes = blend_of(folder / "blend", scale, 33_000)
    num_draws = 4 * sum(sizes.values())
    with read_ahead_divided(scale):
        for part in (0.02, 0.05, 0.1, 0.2) if large else (0.02, 0.2):
            what = f"ten sources of 400 to 205 000 samples over {scale}"
            yield from run(blend, what, num_draws, part, 33_792, WINDOW // scale)


def rows(folder: Path, large: bool = False) -> Iterator[Row]:
    """Yields all rows: a source, ten sources that are fetched, and ten that are simulated."""
    num_samples = 64_000 if large else 12_000
    source = write_samples(folder / "served", num_samples, 75_000)
    for epochs in (3, 10) if large else (3,):
        yield from run(source, f"a source: {epochs} epochs", epochs * num_samples, 0.2, 75_776)
    yield from blends(folder, large)
    if find_spec("energon_lite.extras.remote.kept_ranges"):
        blend, sizes = blend_of(folder / "small", 1 if large else 4, 1)
        config = {"num_streams": 16}
        with open_loader(blend, config, shuffle_buffer_size=10_000) as loader:
            draws = draws_of(loader, 4 * sum(sizes.values()))
        for part in (0.02, 0.05, 0.1, 0.2):
            yield from simulated(draws, sizes, part)


if __name__ == "__main__":
    print_rows(rows)
