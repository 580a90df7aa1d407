"""Describes a batch, or a pack, as the model sees it: rows of tokens, cut into samples.

Works for `PackedSample` and `PackedBatch`, for the inputs of a Hugging Face model, and for any
batch of dicts or dataclasses that has `input_ids`. A description is plain data.

Axes: B rows, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from energon_lite.core.arrays import Int64Array
from energon_lite.core.keys import leaves
from energon_lite.core.samples import images_of
from energon_lite.core.state import RestoreKey
from energon_lite.extras.view.fields import fields_of, sample_facts

IGNORED = -100  # a label without a loss
Columns = dict[str, npt.NDArray[Any]]  # of a row, each (L,)


@dataclass(frozen=True, slots=True)
class Token:
    """A token at its place.

    Attributes:
        id: the token.
        text: what it stands for; empty without a tokenizer.
        label: what the model is to predict; None where the batch has no labels.
        weight: what its loss counts; 0 where there is none.
        position: what the model gets as its position; None where the batch has no positions.
    """

    id: int
    text: str
    label: int | None
    weight: float
    position: int | None


@dataclass(frozen=True)
class Segment:
    """The tokens of one sample, or padding. Attention stays inside of a segment.

    Attributes:
        key: of the sample, as far as it is known; empty for padding.
        source: of the sample, as far as it is known.
        number: counts the samples of the batch from 0; -1 for padding.
        start: its first token in the row.
        stop: the token after its last one.
        tokens: of the sample; none for padding.
        pictures: numbers of its pictures in the batch.
        picture_starts: the first token of each, where the encoder has an `image_token_id`.
    """

    key: str
    source: str
    number: int
    start: int
    stop: int
    tokens: tuple[Token, ...] = field(default=(), repr=False)
    pictures: tuple[int, ...] = ()
    picture_starts: tuple[int, ...] = ()

    @property
    def is_padding(self) -> bool:
        """Whether no sample is here."""
        return self.number < 0

    @property
    def num_targets(self) -> int:
        """Tokens that have a loss."""
        return sum(token.weight != 0 for token in self.tokens)


@dataclass(frozen=True)
class Row:
    """One sequence.

    Attributes:
        length: its tokens, with padding.
        segments: from left to right, without gaps.
        fill: the share of its tokens that is no padding, in 0..1.
    """

    length: int
    segments: tuple[Segment, ...]
    fill: float


@dataclass(frozen=True)
class BatchView:
    """A batch as rows of tokens.

    Attributes:
        rows: none where the batch has no tokens; see its fields.
        pictures: the images of all samples.
        num_samples: segments that are no padding.
        fill: the share of all tokens that is no padding, in 0..1.
    """

    rows: tuple[Row, ...]
    pictures: tuple[Any, ...] = field(repr=False)
    num_samples: int
    fill: float


def batch_view(batch: Any, restore_key: RestoreKey = (), encoder: Any = None) -> BatchView:
    """Describes a batch or a pack.

    Args:
        batch: a pack, a batch of packs, a dict or a dataclass.
        restore_key: of the batch, where it has none; names its samples.
        encoder: the task encoder; its `tokenizer` decodes tokens, its (or the tokenizer's)
            `image_token_id` marks the pictures.
    """
    rows = _token_rows(batch)
    numbers = [_sample_numbers(own) for own in rows]
    runs = [list(_runs_of(own)) for own in numbers]
    num_samples = sum(number > 0 for own in runs for *_, number in own)
    names = enumerate(_names(batch, restore_key, num_samples))
    tokenizer = getattr(encoder, "tokenizer", None)
    image_id = getattr(encoder, "image_token_id", getattr(tokenizer, "image_token_id", None))
    decode, pictures = _decoder(tokenizer), tuple(images_of(batch))
    places = _picture_places(batch, len(pictures), len(rows))
    found = []
    for row, own in enumerate(rows):
        segments = []
        for start, stop, number in runs[row]:
            if number <= 0:
                segments.append(Segment("", "", -1, start, stop))
                continue
            sample, (key, source) = next(names)
            part = {name: column[start:stop] for name, column in own.items()}
            here = tuple(i for i, place in enumerate(places) if place == (row, number))
            starts = tuple(start + place for place in _starts_in(part["ids"], image_id, len(here)))
            tokens = _tokens(part, decode)
            segments.append(Segment(key, source, sample, start, stop, tokens, here, starts))
        found.append(Row(len(own["ids"]), tuple(segments), _mean_fill([numbers[row]])))
    return BatchView(tuple(found), pictures, num_samples, _mean_fill(numbers))


def _mean_fill(numbers: Sequence[Int64Array]) -> float:
    return float((np.concatenate(numbers) > 0).mean()) if numbers else 1.0


def _token_rows(batch: Any) -> list[Columns]:
    """Returns for each row the columns that have a number for each of its tokens."""
    columns = {name: _number_rows(value) for name, value in fields_of(batch).items()}
    tokens = columns.get("input_ids") or columns.get("tokens") or []
    full = {name: rows for name, rows in columns.items() if len(rows) == len(tokens)}
    return [
        {"ids": ids, **{n: rows[row] for n, rows in full.items() if len(rows[row]) == len(ids)}}
        for row, ids in enumerate(tokens)
    ]


def _number_rows(value: Any) -> list[npt.NDArray[Any]]:
    """Returns the rows of numbers (L,), (B, L), or of B lists of them; nothing for others."""
    if isinstance(value, (list, tuple)) and value:
        if type(value[0]) is not int:
            rows = [_number_rows(entry) for entry in value]
            return [row for (row,) in rows] if all(len(own) == 1 for own in rows) else []
        value = np.array([entry if type(entry) is int else IGNORED for entry in value])
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    is_table = isinstance(value, np.ndarray) and value.ndim in (1, 2) and value.size
    return list(value.reshape(-1, value.shape[-1])) if is_table else []


def _sample_numbers(row: Columns) -> Int64Array:
    """Returns for each token the number of its sample in the row, from 1; 0 for padding."""
    if "segment_ids" in row:
        return np.asarray(row["segment_ids"], np.int64)
    mask, positions, labels = (row.get(n) for n in ("attention_mask", "position_ids", "labels"))
    is_real = np.ones(len(row["ids"]), np.bool_) if mask is None else mask > 0
    starts = np.zeros(len(is_real), np.int64)
    if positions is not None:
        if mask is None and labels is not None:
            # Packs have no mask: each token of padding is at position 0, without a label.
            last = np.flatnonzero((positions != 0) | (labels != IGNORED))[-1:]
            is_real[int(last.sum()) + len(last) :] = False
        starts[is_real & (positions == 0)] = 1
    starts[np.flatnonzero(is_real)[:1]] = 1
    return np.where(is_real, np.cumsum(starts), 0)


def _runs_of(numbers: Int64Array) -> Iterator[tuple[int, int, int]]:
    """Yields (start, stop, number) of the runs of equal numbers in a row (L,)."""
    for start, stop in pairwise([0, *(np.flatnonzero(np.diff(numbers)) + 1), len(numbers)]):
        yield int(start), int(stop), int(numbers[start])


def _names(batch: Any, restore_key: RestoreKey, num_samples: int) -> list[tuple[str, str]]:
    """Returns (key, source) of the samples; empty texts where they are not known."""
    facts, nothing = sample_facts(batch), [""] * num_samples
    own = facts.restore_key or restore_key
    found = [leaf for leaf in leaves(own) if len(leaf) == 4] if own else []
    sources, keys = [str(leaf[0]) for leaf in found], list(facts.keys)
    keys = keys or [f"{leaf[0]}[{leaf[2]}]" for leaf in found]
    columns = (column if len(column) == num_samples else nothing for column in (keys, sources))
    return list(zip(*columns, strict=True))


def _tokens(row: Columns, decode: Callable[[int], str]) -> tuple[Token, ...]:
    nothing = [None] * len(row["ids"])
    ids, labels, positions = (
        row[name].tolist() if name in row else nothing for name in ("ids", "labels", "position_ids")
    )
    weights = row.get("loss_weights", row.get("loss_mask"))
    if weights is None:
        weights = np.array([label not in (None, IGNORED) for label in labels], np.float32)
    texts = map(decode, ids)
    return tuple(map(Token, ids, texts, labels, weights.astype(np.float64).tolist(), positions))


def _picture_places(batch: Any, num_pictures: int, num_rows: int) -> list[tuple[int, int]]:
    """Returns for each picture its row and the number of its sample; nothing if not known."""
    segments = fields_of(batch).get("image_segments")
    if segments is None:
        return [(row, 1) for row in range(num_rows)] if num_pictures == num_rows else []
    return [tuple(p) if isinstance(p, list) else (0, p) for p in segments.tolist()]


def _starts_in(ids: npt.NDArray[Any], image_id: Any, num_pictures: int) -> list[int]:
    """Returns where pictures stand: a run of their token for each, or a token for each."""
    places = np.flatnonzero(ids == image_id) if image_id is not None else ids[:0]
    runs = places[np.diff(places, prepend=-2) > 1]
    found = next((own for own in (runs, places) if len(own) == num_pictures), ids[:0])
    return [int(place) for place in found]


def _decoder(tokenizer: Any) -> Callable[[int], str]:
    """Returns what writes a token as text; empty without a tokenizer that can."""

    @cache
    def text(token: int) -> str:
        try:
            return str(tokenizer.decode([token]))
        except Exception:  # a tokenizer may know nothing of a token of padding or of an image
            return ""

    return text
