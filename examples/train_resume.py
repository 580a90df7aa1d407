"""Trains a tiny model on packs of a blend of pictures and texts, stops in mid-epoch, and resumes.

    python examples/train_resume.py --num-workers 2 --steps 120

What to look at: `metadatasets/demo.yaml` defines the blend, `DemoTaskEncoder` how a sample
becomes model input, `make_loader` builds a resumable loader, and `main` saves its state as JSON and
shows that loaders with 1 and with 0 worker processes continue with exactly the batches that the
first loader, with 2, would have returned.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import torch
from draw_data import caption_samples, text_samples, write_shards
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.nn import functional as F

from energon_lite import (
    CaptioningSample,
    DefaultTaskEncoder,
    PackedBatch,
    Packing,
    Sample,
    SavableDataLoader,
    TextSample,
    WorkerConfig,
    edataclass,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    prepare_dataset,
    stateless,
)
from energon_lite.loss import DeferredMean, weighted_mean

METADATASET = Path(__file__).resolve().parents[1] / "metadatasets" / "demo.yaml"
PHOTOGRAPHS = Path(__file__).resolve().parents[2] / "shared" / "data" / "coco_captions"
IMAGE_SIZE = 32
MAX_TOKENS = 96
PICTURE = 256  # the token in whose place the model sees the picture; bytes are 0..255
CAPACITY = 256  # tokens of a pack
BATCH_SIZE = 4  # packs of a batch

console = Console()


# ---------------------------------------------------------------------------------------------
# Data: tar shards, prepared once. `energon-lite prepare FOLDER` does the same from a shell.
# ---------------------------------------------------------------------------------------------


def make_data(folder: Path, num_samples: int) -> None:
    """Draws and prepares the two sets, unless an earlier run did."""
    if (folder / "complete").exists():
        console.print(f"Data: found in {folder}")
        return
    start = time.perf_counter()
    photographs = PHOTOGRAPHS if (PHOTOGRAPHS / "captions.json").is_file() else None
    captions = caption_samples(num_samples, photographs)
    write_shards(folder / "captions", captions, math.ceil(len(captions) / 10))
    write_shards(folder / "text", text_samples(4 * num_samples), math.ceil(num_samples / 2.5))
    prepare_dataset(
        folder / "captions",
        split_ratio="8,1,1",
        sample_type="CaptioningSample",
        field_map={"image": "jpg", "caption": "txt"},
    )
    prepare_dataset(
        folder / "text",
        split_ratio="8,1,1",
        sample_type="TextSample",
        field_map={"text": "txt"},
    )
    (folder / "complete").touch()
    console.print(
        f"Data: {len(captions)} pictures with captions ({len(captions) - num_samples} photographs) "
        f"and {4 * num_samples} texts written to {folder} and prepared "
        f"in {time.perf_counter() - start:.1f} s",
        soft_wrap=True,
    )


# ---------------------------------------------------------------------------------------------
# Task encoder: from a typed sample to model input.
# ---------------------------------------------------------------------------------------------


@edataclass
class TextAndPicture(Sample):
    """What is known before samples are chosen for a pack: the tokens (T,), and the raw picture."""

    tokens: list[int]
    picture: Tensor | None


@edataclass
class EncodedSample(Sample):
    """Model input: tokens (T,) and at most one image (3, 32, 32)."""

    input_ids: Tensor
    images: list[Tensor]


class DemoTaskEncoder(DefaultTaskEncoder):
    """Takes the bytes of a text as tokens, and packs them; resizes and mirrors the pictures."""

    # A size that is set: packs of these small sets may hold samples of two epochs, and are full.
    packing = Packing(capacity=CAPACITY, buffer_size=256)

    @stateless
    def preencode_sample(self, sample: CaptioningSample | TextSample) -> TextAndPicture:
        has_picture = isinstance(sample, CaptioningSample)
        text = sample.caption if has_picture else sample.text
        tokens = [PICTURE] * has_picture + list(text.encode()[:MAX_TOKENS])
        picture = sample.image if has_picture else None
        return TextAndPicture.derive_from(sample, tokens=tokens, picture=picture)

    def sample_length(self, sample: TextAndPicture) -> int:
        return len(sample.tokens)

    @stateless(restore_seeds=True)  # torch.rand returns the same for this sample in any process
    def postencode_sample(self, sample: TextAndPicture) -> EncodedSample:
        images = []
        if sample.picture is not None:
            size = (IMAGE_SIZE, IMAGE_SIZE)
            image = F.interpolate(sample.picture[None], size, mode="bilinear", antialias=True)[0]
            images.append(image.flip(-1) if torch.rand(()) < 0.5 else image)
        return EncodedSample.derive_from(
            sample, input_ids=torch.tensor(sample.tokens), images=images
        )


# ---------------------------------------------------------------------------------------------
# Loader: the blend of metadatasets/demo.yaml.
# ---------------------------------------------------------------------------------------------


def make_loader(num_workers: int, start_method: str) -> SavableDataLoader[PackedBatch]:
    """A resumable loader. `num_streams` fixes the order of samples, whatever `num_workers` is."""
    config = WorkerConfig.default_worker_config(
        num_workers, num_streams=4, start_method=start_method
    )
    dataset = get_train_dataset(
        METADATASET,
        batch_size=BATCH_SIZE,
        shuffle_buffer_size=200,
        max_samples_per_sequence=50,
        task_encoder=DemoTaskEncoder(),
        worker_config=config,
        trust=True,  # the metadataset is ours, and reads DEMO_DATA
    )
    return get_savable_loader(dataset)


# ---------------------------------------------------------------------------------------------
# Model and training.
# ---------------------------------------------------------------------------------------------


class TinyCaptioner(nn.Module):
    """Predicts the next byte of a text from the bytes before it and the picture, if any."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.see = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=4, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * (IMAGE_SIZE // 8) ** 2, width),
        )
        self.embed = nn.Embedding(PICTURE + 1, width)
        self.place = nn.Embedding(1 + MAX_TOKENS, width)
        self.attend = nn.ModuleList([nn.Linear(width, 3 * width) for _ in range(2)])
        self.think = nn.ModuleList(
            [
                nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())
                for _ in range(2)
            ]
        )
        self.predict = nn.Linear(width, PICTURE + 1)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Losses in nats, (B, L): of each token, predicted from those before it in its sample."""
        x = self.embed(batch.input_ids) + self.place(batch.position_ids)
        if batch.images:
            is_picture = batch.input_ids == PICTURE
            x = x.masked_scatter(is_picture[:, :, None], self.see(torch.stack(batch.images)))
        # A sample sees itself only: samples of one pack have nothing to do with each other.
        segments = batch.segment_ids
        mask = (segments[:, :, None] == segments[:, None, :]).tril()
        for attend, think in zip(self.attend, self.think, strict=True):
            q, k, v = attend(x).chunk(3, dim=-1)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + think(x)
        logits = self.predict(x[:, :-1])
        losses = F.cross_entropy(logits.mT, batch.labels[:, 1:], reduction="none")
        return F.pad(losses, (1, 0))


@dataclass
class Trainer:
    """A model with its optimizer."""

    model: TinyCaptioner
    optimizer: torch.optim.Optimizer

    @classmethod
    def new(cls) -> Trainer:
        torch.manual_seed(0)
        model = TinyCaptioner()
        return cls(model, torch.optim.AdamW(model.parameters(), lr=3e-3))

    def step(self, batch: PackedBatch) -> float:
        self.optimizer.zero_grad()
        # With the YAML's loss weights: a text counts half as much as a picture's caption.
        loss = weighted_mean(self.model(batch), batch.loss_weights)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def save(self, path: Path) -> None:
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], path)

    def restore(self, path: Path) -> None:
        model, optimizer = torch.load(path)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


@dataclass
class Fill:
    """How much of the batches is tokens, packed, and how much would be if padded.

    Attributes:
        lengths: tokens of each sample, in the order of training.
        size: tokens and padding of all batches.
    """

    lengths: list[int] = field(default_factory=list)
    size: int = 0

    def add(self, batch: PackedBatch) -> None:
        lengths = batch.cu_seqlens.diff()
        self.lengths += lengths[lengths > 0].tolist()
        self.size += batch.input_ids.numel()

    def packed(self) -> float:
        return sum(self.lengths) / self.size

    def padded(self, batch_size: int = 16) -> float:
        """The same for batches of samples that are padded to the longest of each."""
        starts = range(0, len(self.lengths), batch_size)
        batches = [self.lengths[start : start + batch_size] for start in starts]
        return sum(self.lengths) / sum(max(batch) * len(batch) for batch in batches)


def train(
    trainer: Trainer,
    loader: SavableDataLoader[PackedBatch],
    num_steps: int,
    title: str,
    fill: Fill,
) -> list[str]:
    """Trains for some steps; returns a digest of each batch."""
    digests = []
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.2f}, {task.fields[speed]:6,.0f} samples/s"),
        TimeElapsedColumn(),
        console=console,
    )
    with progress:
        task = progress.add_task(f"{title:<17}", total=num_steps, loss=float("nan"), speed=0.0)
        start, num_samples = time.perf_counter(), 0
        # The range first: zip then takes no batch too many.
        for _, batch in zip(range(num_steps), loader, strict=False):
            loss = trainer.step(batch)
            digests.append(digest(batch))
            fill.add(batch)
            num_samples += len(batch.__key__)
            speed = num_samples / (time.perf_counter() - start)
            progress.update(task, advance=1, loss=loss, speed=speed)
    return digests


def digest(batch: PackedBatch) -> str:
    """Changes if any key or any value of any tensor does."""
    tensors = (batch.input_ids, batch.segment_ids, batch.loss_weights, *batch.images)
    parts = [json.dumps(batch.__key__).encode(), *(bytes(tensor.numpy()) for tensor in tensors)]
    return blake2b(b"".join(parts), digest_size=16).hexdigest()


@torch.no_grad()
def validate(trainer: Trainer) -> float:
    """Mean loss over one pass of the validation parts, one after the other."""
    dataset = get_val_dataset(
        METADATASET,
        batch_size=BATCH_SIZE,
        task_encoder=DemoTaskEncoder(),
        worker_config=WorkerConfig.default_worker_config(num_workers=0),
        trust=True,
    )
    mean = DeferredMean()
    for batch in get_loader(dataset):
        mean.add(trainer.model(batch), batch.loss_weights)
    return mean.finish(()).item()


def main() -> None:
    """Runs the demo."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("demo_data"), help="folder for the data")
    parser.add_argument("--num-samples", type=int, default=1500, help="pictures to draw")
    parser.add_argument("--steps", type=int, default=120, help="steps before and after the stop")
    parser.add_argument("--num-workers", type=int, default=2, help="processes of the first loader")
    parser.add_argument("--start-method", default="fork", choices=("fork", "forkserver", "spawn"))
    args = parser.parse_args()

    # This model is too small to gain from threads, and on a busy machine they wait for each other.
    torch.set_num_threads(1)
    make_data(args.data, args.num_samples)
    os.environ["DEMO_DATA"] = str(args.data.resolve())  # metadatasets/demo.yaml asks for it
    trainer = Trainer.new()
    num_left, num_right = args.steps // 2, args.steps - args.steps // 2
    model_file, state_file = args.data / "model.pt", args.data / "state.json"

    fill = Fill()
    loader = make_loader(args.num_workers, args.start_method)
    train(trainer, loader, args.steps, f"Train, {args.num_workers} workers", fill)
    trainer.save(model_file)
    state_file.write_text(json.dumps(loader.save_state_rank()))
    epochs = ", ".join(f"epoch {s.epochs:.2f} of the {n}" for n, s in loader.stats().items())
    console.print(
        f"Saved after step {args.steps}, at {epochs}: {state_file.stat().st_size:,} bytes of JSON",
        soft_wrap=True,
    )
    expected = train(trainer, loader, args.steps, f"Continue, {args.num_workers} workers", fill)

    # As after a crash: nothing but the two files is left.
    trainer = Trainer.new()
    trainer.restore(model_file)
    resumed = make_loader(num_workers=1, start_method=args.start_method)
    resumed.restore_state_rank(json.loads(state_file.read_text()))
    actual = train(trainer, resumed, num_left, "Resume, 1 worker", Fill())
    state_file.write_text(json.dumps(resumed.save_state_rank()))

    resumed = make_loader(num_workers=0, start_method=args.start_method)
    resumed.restore_state_rank(json.loads(state_file.read_text()))
    actual += train(trainer, resumed, num_right, "Resume, 0 workers", Fill())

    console.print(f"Validation loss: {validate(trainer):.2f}")
    console.print(
        f"Packs are {fill.packed():.2%} full; batches of 16 samples, padded to the longest, would "
        f"be {fill.padded():.2%}",
        soft_wrap=True,
    )
    console.print(f"Actual and target shares of the blend in {2 * args.steps} steps:")
    console.print(str(resumed.stats()), soft_wrap=True)
    num_equal = sum(a == b for a, b in zip(actual, expected, strict=True))
    if num_equal < args.steps:
        raise SystemExit(f"Only {num_equal} of the {args.steps} remaining batches are identical.")
    console.print(
        f"[bold green]The remaining {num_equal} batches are identical[/]: same keys, same tensors"
    )


if __name__ == "__main__":
    main()
