"""The samplers in torchdata's `StatefulDataLoader`: a state in mid-epoch resumes with the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from energon_lite import (
    MultipackBatchSampler,
    SplitModalityBatchSampler,
    SplitModalitySampler,
    TokenBudgetBatchSampler,
)

stateful = pytest.importorskip("torchdata.stateful_dataloader")

LENGTHS = [1 + 37 * n % 90 for n in range(200)]
PAIRS = [(n % 4 > 0, length) for n, length in enumerate(LENGTHS)]
SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "multipack": lambda: {"batch_sampler": MultipackBatchSampler(LENGTHS, 100, 3)},
    "tokens": lambda: {"batch_sampler": TokenBudgetBatchSampler(LENGTHS, max_tokens=500)},
    "modality": lambda: {"batch_sampler": SplitModalityBatchSampler(PAIRS, 10)},
    "indices": lambda: {
        "sampler": SplitModalitySampler(range(200), PAIRS, 10), "batch_size": 10,
    },
}  # fmt: skip


class Same:
    """Of an index or a pack itself."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, item: Any) -> Any:
        return item


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", SAMPLERS)
def test_stateful_loader_resumes_in_mid_epoch(name: str, num_workers: int) -> None:
    def loader() -> Any:
        return stateful.StatefulDataLoader(
            Same(), num_workers=num_workers, collate_fn=list, **SAMPLERS[name]()
        )

    whole = list(loader())
    begun = loader()
    batches = iter(begun)
    assert [next(batches) for _ in range(5)] == whole[:5]
    resumed = loader()
    resumed.load_state_dict(begun.state_dict())
    assert list(resumed) == whole[5:] != []
    assert list(resumed) == whole
