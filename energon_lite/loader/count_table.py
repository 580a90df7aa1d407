"""The counts of all sources in a state: columns of integers, each less what others lead to expect.

Samples are mostly as many as draws, draws deviate little from the target, and the target from the
weights in the configuration. A column of zeros takes no place.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from energon_lite.core.arrays import Float64Array
from energon_lite.core.errors import StateError, describe
from energon_lite.core.key_columns import from_planes, planes_of

# What is counted; the rest of `SourceStats` is worked out of these and of the blend.
WHOLE = ("draws", "samples", "batches", "skipped", "tokens", "overlong", "read_ahead")
TIMES = ("read_sec", "encode_sec", "wait_sec")
COUNTED = (*WHOLE, "loss_weight_sum", *TIMES)
# What ranks add up, with what no state has.
SUMMED = (*COUNTED, "loss_sum", "loss_count")
# Times are saved to this part of their sum over all sources, which is kept; loss weights to 1e-12.
_TIME_PARTS, _LOSS_PARTS = 256, 1e12
_LARGEST = 1e100
# The row of the table that is saved apart, since most pipelines read nothing ahead.
_AHEAD = 1 + COUNTED.index("read_ahead")


def weights_in(config: Any) -> dict[str, float]:
    """Returns the sources in a configuration, with their weights; 0 for a schedule or no blend."""
    return dict(_weights_in(config, 0.0))


def _weights_in(config: Any, weight: float) -> Iterator[tuple[str, float]]:
    for entry in config if isinstance(config, list) else ():
        yield from _weights_in(entry, weight)
    if isinstance(config, dict):
        if config.get("stage") == "source" and isinstance(config.get("name"), str):
            yield config["name"], weight
        if "weight" in config:  # in a nested blend [[number of the blend, weight], ..., own weight]
            row = config["weight"] if isinstance(config["weight"], list) else [config["weight"]]
            parts = (part[-1] if isinstance(part, list) and part else part for part in row)
            weight = math.prod(map(_finite, parts))
        yield from _weights_in(config.get("of"), weight)


def _finite(value: Any) -> float:
    return float(value) if type(value) in (int, float) and abs(value) < _LARGEST else 0.0


class CountTable(NamedTuple):
    """Counts of one rank, and the target of the run.

    Attributes:
        names: of N sources, those of the configuration before others.
        target: shape (N,), samples.
        counts: shape (11, N), in the order of `COUNTED`.
    """

    names: list[str]
    target: Float64Array
    counts: Float64Array

    def rows(self) -> dict[str, dict[str, float]]:
        """Returns target and counts by source."""
        whole, rest = np.split(self.counts, [len(WHOLE)])
        columns = [self.target.tolist(), *whole.astype(np.int64).tolist(), *rest.tolist()]
        rows = zip(*columns, strict=True)
        fields = ("target", *COUNTED)
        return {
            name: dict(zip(fields, row, strict=True))
            for name, row in zip(self.names, rows, strict=True)
        }

    def to_json(self, weights: Mapping[str, float]) -> Any:
        """Returns the table as JSON, beside a configuration with sources of these weights."""
        unit, by = max(1e-6, 1e-15 * float(self.target.sum())), _by_weight(weights, self.names)
        whole = self.counts[-len(TIMES) :].sum(axis=1)
        sums = whole.round(6)
        table = np.concatenate([np.rint(self.target / unit)[None], self.counts])
        mean = table[8] / np.where(table[2], table[2], np.inf) - (table[2] != 0)
        table[8] = _LOSS_PARTS * mean.clip(-1e6, 1e6)
        parts = table[9:].cumsum(axis=1) * (_TIME_PARTS / np.where(sums, whole, np.inf))[:, None]
        table[9:] = np.diff(np.rint(parts), axis=1, prepend=0)
        np.rint(table, out=table)
        pairs = (table[0], by), (table[1], table[0])
        scales = [_finite(float(own.sum() / (other.sum() or 1.0))) for own, other in pairs]
        # Each column before those that it is expected by.
        table[4] -= table[1] - table[2] - table[_AHEAD]
        table[3] -= table[2]
        table[2] -= table[1]
        table[1] -= np.rint(table[0] * scales[1])
        table[0] -= np.rint(by * scales[0])
        columns = [planes_of(column) for column in table.astype(np.int64)]
        read_ahead = columns.pop(_AHEAD)
        return {
            "others": self.names[len(weights) :],
            "scales": [*scales, unit, *sums.tolist()],
            "columns": columns,
            **({"read_ahead": read_ahead} if read_ahead else {}),
        }

    @classmethod
    def from_json(cls, value: Any, weights: Mapping[str, float]) -> CountTable:
        """Returns the table of which `to_json` returned the value.

        Raises:
            StateError: It is corrupt.
        """
        try:
            names, columns = [*weights, *value["others"]], [*value["columns"]]
            columns.insert(_AHEAD, value.get("read_ahead", []))
            scales = [*map(_finite, value["scales"])]
            if {*map(type, names)} - {str} or len({*names}) < len(names):
                raise ValueError("it has other sources")
            if len(columns) != 1 + len(COUNTED) or scales != value["scales"]:
                raise ValueError("it has other columns or scales")
            table = np.array([from_planes(planes, len(names)) for planes in columns], np.float64)
            table[0] += np.rint(_by_weight(weights, names) * scales[0])
            table[1] += np.rint(table[0] * scales[1])
            table[2] += table[1]
            table[3] += table[2]
            table[4] += table[1] - table[2] - table[_AHEAD]
            if not np.abs(table).max(initial=0) < 1 << 62:
                raise ValueError("a number is too large")
            table[0] *= scales[2]
            table[8] = table[2] * (1 + table[8] / _LOSS_PARTS)
            table[9:] *= np.array([[total / _TIME_PARTS] for total in scales[3:]])
            return cls(names, table[0], table[1:])
        except (TypeError, ValueError, LookupError, AttributeError, zlib.error) as error:
            raise StateError(
                f"the state's 'stats' is {value!r:.80}, not statistics as this version saves them: "
                f"{describe(error)[:200]}"
            ) from error


def _by_weight(weights: Mapping[str, float], names: Sequence[str]) -> Float64Array:
    return np.pad([*weights.values()], (0, len(names) - len(weights)))
