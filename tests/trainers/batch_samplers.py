"""What each rank runs for test_samplers_accelerate."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from energon_lite import (
    MultipackBatchSampler,
    SplitModalityBatchSampler,
    SplitModalitySampler,
    TokenBudgetBatchSampler,
)

from .hf import LoaderTrainer, arguments_of

NUM = 400
LENGTHS = np.clip(np.random.Generator(np.random.Philox(3)).lognormal(4, 1, NUM), 1, 500).astype(int)
MODALITIES = [(index % 4 > 0, int(length)) for index, length in enumerate(LENGTHS)]
EPOCHS = 2


class Rows:
    """Of an index or a pack its indices, as a tensor padded with -1."""

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: Any) -> torch.Tensor:
        indices = index if isinstance(index, list) else [index]
        return torch.tensor(indices + [-1] * (60 - len(indices)))


def axolotl(sampler: Any, **settings: Any) -> MultipackBatchSampler:
    return MultipackBatchSampler(
        sampler=sampler, lengths=LENGTHS, batch_size=3, batch_max_len=500, **settings
    )


SAMPLERS: dict[str, Callable[[], Any]] = {
    "multipack": lambda: MultipackBatchSampler(LENGTHS, 500, 3),
    "multipack_drop_last": lambda: MultipackBatchSampler(LENGTHS, 500, 4, drop_last=True),
    "modality": lambda: SplitModalityBatchSampler(MODALITIES, 10),
    "modality_alone": lambda: SplitModalityBatchSampler(MODALITIES, 10, rank=0, num_replicas=1),
    "modality_indices": lambda: SplitModalitySampler(Rows(), MODALITIES, 10),
    "tokens": lambda: TokenBudgetBatchSampler(LENGTHS, max_tokens=1500),
    "of_seven": lambda: TokenBudgetBatchSampler(LENGTHS, batch_size=7, window=50),
    "axolotl_sequential": lambda: axolotl(SequentialSampler(range(NUM))),
    "axolotl_random": lambda: axolotl(RandomSampler(range(NUM))),
    "axolotl_seeded": lambda: axolotl(
        RandomSampler(range(NUM), generator=torch.Generator().manual_seed(5))
    ),
    "placed": lambda: MultipackBatchSampler(
        LENGTHS, 500, 3, rank=int(os.environ["RANK"]), world_size=2
    ),
}


def loader_of(sampler: Any, num_workers: int = 0) -> Any:
    if isinstance(sampler, SplitModalitySampler):
        return DataLoader(Rows(), 5, sampler=sampler, num_workers=num_workers)  # type: ignore[arg-type]
    return DataLoader(Rows(), batch_sampler=sampler, num_workers=num_workers)  # type: ignore[arg-type]


def indices_of(batch: torch.Tensor) -> list[int]:
    return [int(index) for index in batch.ravel() if index >= 0]


def accelerate_case(
    name: str, *, early: bool = False, prepared: bool = True, skip: int = 0, stop: int = 0,
    num_workers: int = 0, gather: bool = False, **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """Returns the indices of each batch of each epoch on this rank."""
    set_seed(5)
    sampler = SAMPLERS[name]() if early else None
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**settings))
    loader = loader_of(sampler or SAMPLERS[name](), num_workers)
    before = len(loader)
    if prepared:
        loader = accelerator.prepare(loader)
    epochs = [[indices_of(batch) for batch in loader] for _ in range(EPOCHS)]
    found = {"before": before, "len": len(loader), "epochs": epochs}
    if gather:
        batches = [accelerator.gather_for_metrics(batch) for batch in loader]
        found["gathered"] = [index for batch in batches for index in indices_of(batch)]
    if skip:
        loader.set_epoch(1)
        found["skipped"] = [indices_of(batch) for batch in skip_first_batches(loader, skip)]
    if stop:
        loaders = [accelerator.prepare(loader_of(SAMPLERS[name](), num_workers)) for _ in range(2)]
        batches = iter(loaders[0])
        found["before_stop"] = [indices_of(next(batches)) for _ in range(stop)]
        loaders[1].load_state_dict(loaders[0].state_dict())
        found["resumed"] = [indices_of(batch) for batch in loaders[1]]
    return found


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * rows.float().mean()).sum()}


def trainer_case(name: str, *, out: str, resume: bool = False, num_workers: int = 0) -> Any:
    """Returns the indices of each batch on this rank, in the Trainer of transformers."""
    seen: list[list[int]] = []

    class Recorded(LoaderTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **settings: Any) -> Any:
            seen.append(indices_of(inputs["rows"]))
            return super().training_step(model, inputs, *args, **settings)

    loader = loader_of(SAMPLERS[name](), num_workers)
    loader.collate_fn = lambda rows: {"rows": torch.stack(rows)}
    arguments = arguments_of(
        out, num_train_epochs=EPOCHS, save_steps=7, logging_strategy="no", save_only_model=False
    )
    trainer = Recorded(loader, model=Model(), args=arguments, train_dataset=Rows())
    trainer.train(resume_from_checkpoint=f"{out}/checkpoint-7" if resume else None)
    return {"steps": seen, "global_step": trainer.state.global_step}


def run_cases(cases: list[dict[str, Any]]) -> list[Any]:
    """What each case gives on this rank."""
    os.environ["ACCELERATE_USE_CPU"] = "1"
    AcceleratorState._reset_state(reset_partial_state=True)  # of the process that was forked
    torch.set_num_threads(1)
    results = []
    for case in cases:
        settings = dict(case)
        kind = {"accelerate": accelerate_case, "trainer": trainer_case}[settings.pop("kind")]
        try:
            results.append(kind(**settings))  # type: ignore[operator]
        except (ValueError, TypeError) as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
        AcceleratorState._reset_state()
    torch.distributed.destroy_process_group()
    return results
