"""Trains with Ray Train, resizes from two ranks to one and to three: python examples/ray_train.py.

Batches are computed by actors of the cluster. After each resize they are those that would have
followed, which the example proves.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import webdataset
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

from energon_lite import (
    DefaultTaskEncoder,
    RayWorkers,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    prepare_dataset,
    stateless,
)

STEPS = 6


class Numbers(DefaultTaskEncoder):
    """Makes a batch of numbers of texts."""

    @stateless
    def encode_batch(self, batch: Any) -> dict[str, Any]:
        numbers = [float(text.split()[1]) for text in batch.text]
        return {"x": torch.tensor(numbers)[:, None] / 100, "keys": batch.__key__}


def loader_of(folder: str, config: WorkerConfig, workers: Any = None) -> Any:
    dataset: Any = get_train_dataset(
        folder, batch_size=4, shuffle_buffer_size=100, worker_config=config, task_encoder=Numbers()
    )
    return get_savable_loader(dataset, workers=workers)


def train_loop(settings: dict[str, Any]) -> None:
    """Runs in each rank of Ray Train, which has set up `torch.distributed`."""
    config = WorkerConfig.default_worker_config(1, num_streams=6)
    loader = loader_of(settings["folder"], config, RayWorkers(1, spares=0))
    own = torch.nn.Linear(1, 1)
    if settings["checkpoint"]:
        saved = torch.load(Path(settings["checkpoint"], "state.pt"))
        loader.load_state_dict(saved["loader"])
        own.load_state_dict(saved["model"])
    model, keys = prepare_model(own), []
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _, batch in zip(range(STEPS), loader, strict=False):
        loss = (model(batch["x"]) - 2 * batch["x"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        keys.append([*batch["keys"]])
    state = {"loader": loader.state_dict(), "model": own.state_dict()}  # on all ranks
    rank = config.rank
    Path(settings["out"], f"{rank}.json").write_text(json.dumps(keys))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            torch.save(state, Path(folder, "state.pt"))
            checkpoint = train.Checkpoint.from_directory(folder)
        train.report({"loss": float(loss)}, checkpoint=checkpoint)
    loader.shutdown()


def run(num_ranks: int, root: Path, checkpoint: str) -> tuple[list[list[str]], str]:
    """Trains on some ranks; returns the keys of all batches in order, and the checkpoint."""
    out = root / f"on_{num_ranks}"
    out.mkdir()
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={
            "folder": str(root / "texts"), "checkpoint": checkpoint, "out": str(out)
        },
        scaling_config=train.ScalingConfig(num_workers=num_ranks),
        run_config=train.RunConfig(name=f"on_{num_ranks}", storage_path=str(root)),
        torch_config=TorchConfig(backend="gloo"),
    )  # fmt: skip
    found = trainer.fit()
    ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    steps = zip(*ranks, strict=True)
    return [batch for step in steps for batch in step], found.checkpoint.path


def main() -> None:
    """Trains on two ranks, then on one, then on three; compares with a run that never stopped."""
    if not ray.is_initialized():
        ray.init("local", num_cpus=8, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "texts").mkdir()
        with webdataset.TarWriter(str(root / "texts" / "0.tar")) as tar:
            for number in range(200):
                tar.write({"__key__": f"{number:03}", "txt": f"text {number}"})
        prepare_dataset(
            root / "texts", split_ratio="1,0,0", sample_type="TextSample",
            field_map={"text": "txt"},
        )  # fmt: skip
        found, checkpoint = [], ""
        for num_ranks in (2, 1, 3):
            keys, checkpoint = run(num_ranks, root, checkpoint)
            found += keys
        config = WorkerConfig(rank=0, world_size=1, num_workers=0, num_streams=6)
        whole = loader_of(str(root / "texts"), config)
        expected = [[*batch["keys"]] for _, batch in zip(found, whole, strict=False)]
        assert found == expected
        print(f"{len(found)} batches on 2, 1 and 3 ranks are those of a run that never stopped.")


if __name__ == "__main__":
    main()
