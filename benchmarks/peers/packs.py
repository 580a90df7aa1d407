"""Samples of a batch of packs, counted at once and cut out only if they are compared."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any


def tokens_of(payload: bytes) -> Any:
    """Makes the tensor of tokens that models take."""
    import numpy as np
    import torch

    return torch.from_numpy(np.frombuffer(payload, dtype=np.uint16).astype(np.int64))


class PackedSamples:
    """The samples in rows of tokens, given where they begin and the last one ends.

    Attributes:
        num_samples: how many there are.
        rows: for each pack its tokens and its boundaries, in which the last may be repeated.
    """

    def __init__(self, num_samples: int, rows: Any) -> None:
        self.num_samples, self.rows = num_samples, rows

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[bytes]:
        import numpy as np

        for tokens, bounds in self.rows:
            values = np.asarray(tokens).astype(np.uint16)
            yield from (values[a:b].tobytes() for a, b in itertools.pairwise(bounds) if a < b)
