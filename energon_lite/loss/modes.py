"""What the loss of one token counts, by how many of them its sample has."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

LossMode = Literal["token", "sample", "sqrt"] | Callable[[int], float]


def token_weight(mode: LossMode, num_targets: int) -> float:
    """Returns what the loss of each token counts in a sample with `num_targets` of them.

    Times the sample's own loss weight, this is the weight of a token, packed or not; the total of
    all weights is the denominator.

    Args:
        mode: "token", each token counts 1; "sample", each sample counts 1; "sqrt", a sample counts
            as the root of its tokens (InternVL's square averaging); or a function of `num_targets`.
        num_targets: tokens of the sample whose loss counts.

    Returns:
        The weight; 0 without targets.

    Raises:
        ValueError: A weight is below 0, infinite or NaN; or there is no such mode.

    Example:
        >>> [token_weight(mode, 4) for mode in ("token", "sample", "sqrt")]
        [1.0, 0.25, 0.5]
    """
    if num_targets == 0:
        return 0.0
    if callable(mode):
        weight = float(mode(num_targets))
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(
                f"the loss function returned {weight} for {num_targets} tokens; it must be finite "
                "and at least 0."
            )
        return weight
    if mode not in ("token", "sample", "sqrt"):
        raise ValueError(f"mode={mode!r} must be 'token', 'sample', 'sqrt' or a function.")
    exponent = {"token": 0.0, "sample": -1.0, "sqrt": -0.5}[mode]
    return float(num_targets**exponent)
