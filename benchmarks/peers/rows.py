"""The rows of the table: what is read, by how many workers, and in which form it arrives."""

from __future__ import annotations

from dataclasses import dataclass

PACK_TOKENS = 4096


@dataclass(frozen=True)
class Row:
    """One thing to measure.

    Attributes:
        name: what `--rows` selects it by.
        title: the first cell of its line.
        group: rows that a loader either has or lacks: "text", "hooks" (texts through `hook.py`, as
            lists of arrays), "bytes", "pictures", "blends" (of texts) or "packed".
        kind: the samples (see `samples.py`): "text", "jpeg", "photo" or "tokens".
        goal: CPU time that ours should need per sample, in µs.
        workers: worker processes; 0 computes in the process that iterates.
        num_sources: datasets that the samples are divided into.
        batch_size: samples of a batch; or packs.
        image_size: shorter side of pictures after an antialiased resize; None leaves them as
            they are.
    """

    name: str
    title: str
    group: str
    kind: str
    goal: str = ""
    workers: int = 0
    num_sources: int = 1
    batch_size: int = 16
    image_size: int | None = None

    @property
    def is_decoded(self) -> bool:
        """Whether pictures arrive as uint8 tensors (3, H, W), stacked to one of the batch."""
        return self.group == "pictures"


_TEXT, _BYTES = "texts of 500 B", "JPEG of 74 KB as bytes"
_JPEG, _PHOTO = "JPEG of 512 x 512 to tensors", "JPEG of 12 megapixels to 224"
_ALL = (
    Row("text-0", f"{_TEXT}, 0 workers", "text", "text", "≤ 3.5"),
    Row("text-1", f"{_TEXT}, 1 worker", "text", "text", "≤ 8", workers=1),
    Row("text-2", f"{_TEXT}, 2 workers", "text", "text", "≤ 9", workers=2),
    Row("hook-0", f"{_TEXT} through a hook, 0 workers", "hooks", "text"),
    Row("hook-2", f"{_TEXT} through a hook, 2 workers", "hooks", "text", workers=2),
    Row("bytes-0", f"{_BYTES}, 0 workers", "bytes", "jpeg", "≤ 28"),
    Row("bytes-2", f"{_BYTES}, 2 workers", "bytes", "jpeg", "≤ 60", workers=2),
    Row("jpeg-0", f"{_JPEG}, 0 workers", "pictures", "jpeg", "≤ 1,130"),
    Row("jpeg-2", f"{_JPEG}, 2 workers", "pictures", "jpeg", "≤ 1,250", workers=2),
    Row(
        "resized-0", f"{_JPEG}, resized to 224, 0 workers", "pictures", "jpeg",
        "≤ Energon / 3", image_size=224,
    ),
    Row(
        "resized-2", f"{_JPEG}, resized to 224, 2 workers", "pictures", "jpeg",
        "≤ Energon / 3", workers=2, image_size=224,
    ),
    Row(
        "photo-0", f"{_PHOTO}, 0 workers", "pictures", "photo",
        "≤ Energon / 10", batch_size=4, image_size=224,
    ),
    Row("blend-2", "blend of 2 sources of texts", "blends", "text", "≤ 4", num_sources=2),
    Row("blend-10", "blend of 10 sources", "blends", "text", "≤ 5", num_sources=10),
    Row("blend-100", "blend of 100 sources", "blends", "text", "≤ 8", num_sources=100),
    Row("blend-1000", "blend of 1,000 sources", "blends", "text", "≤ 13", num_sources=1000),
    Row("packed-0", "texts of 160 tokens, packed", "packed", "tokens", "≤ 7", batch_size=2),
)  # fmt: skip
ROWS = {row.name: row for row in _ALL}
