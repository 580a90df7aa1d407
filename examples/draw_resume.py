"""Draws docs/images/resume.svg: a run on 4 ranks resumes on 3, with the same batches.

    python examples/draw_resume.py [FILE]

It writes two small sets of texts, runs, saves, resumes, and compares with a run that never stopped.
"""

from __future__ import annotations

import io
import sys
import tarfile
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from drawing import COLOURS, IMAGES, box, line, text, write_picture

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset, prepare_dataset

SIZES = {"books": 20, "chats": 9}
BLEND = """\
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
      - {path: books, weight: 2}
      - {path: chats, weight: 1}
"""
SHADES = {"books": COLOURS[0], "chats": COLOURS[3]}
STREAMS, FIRST_STEPS, NUM_BATCHES = 12, 3, 24
SIZE, GAP, LEFT, TOP = 27.0, 4.0, 70.0, 56.0

# The number of a batch in the run, its source and the number of its sample.
Batch = tuple[int, str, int]


def write_data(folder: Path) -> Path:
    """Writes two sets of texts, and a blend of them."""
    for name, number in SIZES.items():
        (folder / name).mkdir()
        with tarfile.open(folder / name / "texts.tar", "w") as tar:
            for i in range(number):
                member = tarfile.TarInfo(f"{name}_{i}.txt")
                tar.addfile(member, io.BytesIO())
        prepare_dataset(
            folder / name, split_parts={"train": ".*"}, sample_type="TextSample",
            field_map={"text": "txt"}, num_workers=0,
        )  # fmt: skip
    (folder / "blend.yaml").write_text(BLEND)
    return folder / "blend.yaml"


def loaders(path: Path, num_ranks: int) -> list[Any]:
    """Opens the loaders of all ranks, as the processes of a training would, each its own."""
    opened = []
    for rank in range(num_ranks):
        config = WorkerConfig(rank=rank, world_size=num_ranks, num_workers=0, num_streams=STREAMS)
        dataset = get_train_dataset(
            path, batch_size=1, shuffle_buffer_size=100, max_samples_per_sequence=None,
            worker_config=config,
        )  # fmt: skip
        opened.append(get_savable_loader(dataset))
    return opened


def read(ranks: list[Any], first: int, num_batches: int) -> list[Batch]:
    """Reads the next batches of a run: in each step every rank has one."""
    found = []
    for rank, loader in enumerate(ranks):
        for step, batch in enumerate(islice(loader, num_batches // len(ranks))):
            source, _, number = batch.__key__[0].partition("_")
            found.append((first + step * len(ranks) + rank, source, int(number)))
    return sorted(found)


def resumed(path: Path) -> list[Batch]:
    """Runs on 4 ranks, saves, and resumes on 3."""
    four, num_first = loaders(path, 4), 4 * FIRST_STEPS
    batches = read(four, 0, num_first)
    states = [loader.state_dict() for loader in four]
    three = loaders(path, 3)
    for loader in three:
        loader.load_state_dict(states)
    return batches + read(three, num_first, NUM_BATCHES - num_first)


def cell(x: float, y: float, batch: Batch) -> list[str]:
    """Draws a batch: the number of its sample, in the colour of its source."""
    _, source, number = batch
    colour = SHADES[source]
    middle = x + SIZE / 2
    return [
        box(x, y, SIZE, SIZE, colour),
        text(middle, y + 18, str(number), anchor="middle", colour="#fff", weight="bold"),
    ]


def panel(x: float, num_ranks: int, batches: list[Batch]) -> list[str]:
    """Draws a row of batches for each rank."""
    parts = [text(x, TOP - 14, f"{num_ranks} ranks", weight="bold")]
    for place, batch in enumerate(batches):
        step, rank = divmod(place, num_ranks)
        parts += cell(x + step * (SIZE + GAP), TOP + rank * (SIZE + GAP), batch)
    return parts


def draw(batches: list[Batch], path: Path) -> None:
    """Draws both parts of the run, and below them the batches one after the other."""
    pitch, first = SIZE + GAP, 4 * FIRST_STEPS
    right = LEFT + FIRST_STEPS * pitch + 170
    middle, arrow = right - 85, TOP + 1.5 * pitch
    parts = [text(LEFT - 8, TOP + r * pitch + 18, f"rank {r}", anchor="end") for r in range(4)]
    parts += panel(LEFT, 4, batches[:first]) + panel(right, 3, batches[first:])
    parts += [
        text(middle, arrow - 12, "stop, save: JSON", anchor="middle"),
        line([(middle - 55, arrow), (middle + 55, arrow)], "#333", 1.5),
        line(
            [(middle + 48, arrow - 5), (middle + 55, arrow), (middle + 48, arrow + 5)], "#333", 1.5
        ),
        text(middle, arrow + 20, "resume elsewhere", anchor="middle"),
    ]
    below = TOP + 4 * pitch + 44
    title = "the same batches, by their number in the run: those of a run that was never stopped"
    parts.append(text(LEFT, below - 12, title, weight="bold"))
    for place, batch in enumerate(batches):
        parts += cell(LEFT + place * pitch, below, batch)
    width = LEFT + len(batches) * pitch + 20
    for place, name in enumerate(SIZES):
        x = width - 260 + 130 * place
        parts += [box(x, 14, 14, 14, SHADES[name]), text(x + 20, 26, f"a sample of {name}")]
    write_picture(path, round(width), round(below + SIZE + 16), parts)


def main(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        blend = write_data(Path(folder))
        batches, expected = resumed(blend), read(loaders(blend, 1), 0, NUM_BATCHES)
    if batches != expected:
        raise SystemExit(f"the resumed run differs: {batches} where {expected} was expected")
    draw(batches, path)
    print(f"{len(batches)} batches on 4 and then 3 ranks, as without a stop; drawn in {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES / "resume.svg")
