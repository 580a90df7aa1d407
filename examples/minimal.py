"""Reads a folder of tar shards with `jpg` and `txt` parts: python examples/minimal.py FOLDER."""

import sys
from pathlib import Path

from energon_lite import get_savable_loader, get_train_dataset, prepare_dataset


def main(path: Path) -> None:
    if not (path / ".nv-meta").exists():
        fields = {"image": "jpg", "caption": "txt"}
        prepare_dataset(path, split_ratio="8,1,1", sample_type="CaptioningSample", field_map=fields)
    dataset = get_train_dataset(
        path, batch_size=4, shuffle_buffer_size=100, max_samples_per_sequence=50
    )
    loader = get_savable_loader(dataset)
    for _, batch in zip(range(5), loader, strict=False):
        print(batch.image.shape, batch.caption)
    state = loader.save_state_rank()  # for restore_state_rank(state)
    print(len(str(state)), "bytes of state")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
