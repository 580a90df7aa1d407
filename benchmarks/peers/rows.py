"""The rows of the table: what is read, by how many workers, and in which form it arrives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One thing to measure.

    Attributes:
        name: what `--rows` selects it by.
        title: the first cell of its line.
        group: rows that a loader either has or lacks.
        kind: the samples (see `samples.py`): "text", "jpeg", "photo" or "tokens".
        num_sources: datasets that the samples are divided into.
        workers: worker processes; 0 computes in the process that iterates.
        batch_size: samples of a batch; or packs.
        is_decoded: pictures arrive as uint8 tensors (3, H, W), stacked to one of the batch.
        image_size: their shorter side after an antialiased resize; None leaves them as they are.
        goal_us: CPU time that ours should need per sample.
    """

    name: str
    title: str
    group: str
    kind: str
    num_sources: int = 1
    workers: int = 0
    batch_size: int = 16
    is_decoded: bool = False
    image_size: int | None = None
    goal_us: float | None = None


def _rows() -> list[Row]:
    texts = [
        Row(f"text-{w}", f"texts of 500 B, {_workers(w)}", "text", "text", workers=w, goal_us=goal)
        for w, goal in ((0, 3.5), (1, 8), (2, 9))
    ]
    jpeg = [
        Row(
            f"bytes-{w}", f"JPEG of 74 KB as bytes, {_workers(w)}", "bytes", "jpeg",
            workers=w, goal_us=goal,
        )
        for w, goal in ((0, 28), (2, 60))
    ]  # fmt: skip
    decoded = [
        Row(
            f"{name}-{w}", f"{title}, {_workers(w)}", "pictures", kind, workers=w,
            batch_size=size, is_decoded=True, image_size=pixels, goal_us=goal,
        )
        for name, title, kind, size, pixels, goals in (
            ("jpeg", "JPEG of 512 x 512 to tensors", "jpeg", 16, None, ((0, 1130), (2, 1250))),
            ("resized", "the same, resized to 224", "jpeg", 16, 224, ((0, None), (2, None))),
            ("photo", "JPEG of 12 megapixels, resized to 224", "photo", 4, 224, ((0, None),)),
        )
        for w, goal in goals
    ]  # fmt: skip
    blends = [
        Row(f"blend-{k}", f"blend of {k:,} sources of texts", "blends", "text", k, goal_us=goal)
        for k, goal in ((2, 4), (10, 5), (100, 8), (1000, 13))
    ]
    packed = Row(
        "packed-0", "texts of 160 tokens in packs of 4,096", "packed", "tokens", batch_size=2,
        goal_us=7,
    )  # fmt: skip
    return [*texts, *jpeg, *decoded, *blends, packed]


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


PACK_TOKENS = 4096
ROWS = {row.name: row for row in _rows()}
