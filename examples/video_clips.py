"""Videos: a clip of 8 frames at random out of each, decoded alone, for a small video classifier.

    python examples/video_clips.py       # needs PyAV, the extra [av]

Writes videos of a square that moves up, down, left or right. A sample has an `mp4` and a `cls`;
the cooker gets an `AVDecoder` for the first, which decodes the frames that it is asked for. Prints
how the loss falls and how many unseen videos are right, and checks that a resumed loader has the
same random clips.
"""

import argparse
import io
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from draw_data import write_shards
from torch import nn

from energon_lite import (
    Cooker,
    DefaultTaskEncoder,
    SavableDataLoader,
    WorkerConfig,
    basic_sample_keys,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    prepare_dataset,
    sample_rng,
    stateless,
)

FOLDER = Path("demo_data/videos")
SIZE, FRAMES = 32, 8
STEPS = [(1, 0), (-1, 0), (0, 1), (0, -1)]  # of a square that moves down, up, right, left


def draw_videos(num_videos: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    for i in range(num_videos):
        kind, file = int(rng.integers(len(STEPS))), io.BytesIO()
        place = rng.integers(SIZE, size=2)
        with av.open(file, "w", format="mp4") as container:
            stream = container.add_stream("mpeg4", rate=8)
            stream.width = stream.height = SIZE
            for _ in range(int(rng.integers(16, 32))):
                place += STEPS[kind]
                image = np.full((SIZE, SIZE, 3), 40, np.uint8)
                top, left = place % (SIZE - 8)
                image[top : top + 8, left : left + 8] = 220
                container.mux(stream.encode(av.VideoFrame.from_ndarray(image)))
            container.mux(stream.encode())
        yield {"__key__": f"video{i:03d}", "mp4": file.getvalue(), "cls": kind}


@stateless
def cook(parts: dict[str, Any]) -> dict[str, Any]:
    """Eight frames from a random place; `sample_rng` draws the same for this sample anywhere."""
    video = parts["mp4"]  # an AVDecoder; nothing is decoded yet
    start = int(sample_rng().integers(video.get_metadata().video_num_frames - FRAMES + 1))
    frames = (start, start + FRAMES - 1)  # both are part of the clip
    (clip,) = video.get_clips(video_clip_ranges=[frames], video_unit="frames").video_clips
    return {**basic_sample_keys(parts), "clip": clip, "label": torch.tensor(parts["cls"])}


class ClipEncoder(DefaultTaskEncoder):
    def __init__(self) -> None:
        super().__init__()
        self.cookers = [Cooker(cook)]


def make_loader(num_workers: int) -> SavableDataLoader[dict[str, Any]]:
    config = WorkerConfig.default_worker_config(num_workers, num_streams=2)
    dataset = get_train_dataset(
        FOLDER, batch_size=10, task_encoder=ClipEncoder(), worker_config=config
    )
    return get_savable_loader(dataset)


def make_model() -> nn.Module:
    """Compares neighbouring frames; clips are (B, frames, 3, H, W), uint8."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv3d(3, 16, (2, 5, 5), stride=(1, 2, 2)), nn.ReLU(),
        nn.Conv3d(16, 32, (1, 3, 3), stride=(1, 2, 2)), nn.ReLU(),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, len(STEPS)),
    )  # fmt: skip


def scores(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return model(batch["clip"].transpose(1, 2) / 255 - 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--videos", type=int, default=160)
    args = parser.parse_args()
    torch.set_num_threads(1)
    write_shards(FOLDER, draw_videos(args.videos), samples_per_shard=args.videos // 8)
    prepare_dataset(FOLDER, split_ratio="7,1", sample_type="CrudeWebdataset", force_overwrite=True)

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader, losses = make_loader(num_workers=2), []
    for batch in islice(loader, args.steps):
        loss = nn.functional.cross_entropy(scores(model, batch), batch["label"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"clips {tuple(batch['clip'].shape)}; loss {losses[0]:.2f} ... {losses[-1]:.2f}")

    resumed = make_loader(num_workers=0)
    resumed.load_state_dict(loader.state_dict())
    for expected, found in zip(islice(loader, 5), resumed, strict=False):
        assert torch.equal(expected["clip"], found["clip"])
    print("a resumed loader without workers has the same random clips")

    config = WorkerConfig.default_worker_config(num_workers=0)
    val = get_val_dataset(FOLDER, batch_size=20, task_encoder=ClipEncoder(), worker_config=config)
    right = [scores(model, batch).argmax(1) == batch["label"] for batch in get_loader(val)]
    print(f"{torch.cat(right).sum()} of {len(torch.cat(right))} unseen videos are right")


if __name__ == "__main__":
    main()
