"""Packs of a map-style dataset's samples, and model inputs made of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from torch.utils.data import Dataset

from energon_lite.batching.rules import Packing, check_fields
from energon_lite.stages.model_inputs import Attention, model_inputs
from energon_lite.stages.packed_sample import PackedBatch, PackedSample, pack_samples


class PackedRows(Dataset[PackedSample]):
    """A map-style dataset whose items are packs of another one's samples.

    `MultipackBatchSampler` yields batches of packs of indices. `datasets.Dataset`, `Subset` and
    others that read a batch at once (`__getitems__`) take a flat list of indices only; this one
    takes packs, and reads all samples of a batch at once where the dataset can:

        rows = PackedRows(dataset, packing)
        sampler = MultipackBatchSampler(dataset["length"], packing.capacity, batch_size=4)
        loader = DataLoader(rows, batch_sampler=sampler, collate_fn=PackedCollator(packing))

    An index that is not in a pack is a pack of one sample.

    Args:
        dataset: with `__getitem__`. Samples have `input_ids` (t,), and what else `pack_samples`
            takes: dicts, dataclasses or NamedTuples, of tensors, arrays or lists.
        packing: how samples become a pack; `capacity` as that of the sampler.
        encode: called with each sample; returns what is packed.

    Raises:
        TypeError: The dataset cannot be read by index.
    """

    def __init__(
        self, dataset: Any, packing: Packing, encode: Callable[[Any], Any] | None = None
    ) -> None:
        if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__getitems__"):
            raise TypeError(
                f"{type(dataset).__name__} cannot be read by index. PackedRows needs a map-style "
                "dataset; a stream of samples is packed by a task encoder with `packing`."
            )
        self.dataset = dataset
        self.packing = packing
        self.encode = encode

    def __len__(self) -> int:
        """Returns the number of samples: how many packs they make, the sampler knows."""
        return len(self.dataset)

    def __getitem__(self, item: int | Sequence[int]) -> PackedSample:
        """Returns the pack of the samples of these indices, in their order."""
        return self.__getitems__([item])[0]

    def __getitems__(self, items: Sequence[int | Sequence[int]]) -> list[PackedSample]:
        """Returns a pack for each item, as `__getitem__`; what `DataLoader` calls for a batch."""
        packs = [_indices(item) for item in items]
        samples = iter(self._read(list(chain.from_iterable(packs))))
        return [pack_samples(list(islice(samples, len(pack))), self.packing) for pack in packs]

    def _read(self, indices: list[int]) -> list[Any]:
        read = getattr(self.dataset, "__getitems__", None)
        rows = read(indices) if read else [self.dataset[index] for index in indices]
        if self.encode is not None:
            rows = [self.encode(row) for row in rows]
        # A key by which messages name the sample.
        return [
            {"__key__": str(index), **row} if isinstance(row, dict) else row
            for index, row in zip(indices, rows, strict=True)
        ]


def _indices(item: int | Iterable[int]) -> list[int]:
    return list(map(operator.index, item)) if isinstance(item, Iterable) else [operator.index(item)]


@dataclass(frozen=True)
class PackedCollator:
    """Makes the inputs of a Hugging Face model of packs: a `collate_fn`.

    They are `input_ids`, `labels` and `position_ids`, each (B, L), what keeps samples of a pack
    apart, and what a processor made besides: fields with an entry per token, `pixel_values`,
    `image_grid_thw`, and positions (4, B, L) of samples that have three rows. Tokens that do not
    count in the loss have the label -100. A task encoder makes the same of its packs with
    `Packing(output="huggingface")`.

    Args:
        packing: as of the packs; its `layout` and `pad_to_capacity` say how large a batch is.
        attention: "position_ids" leaves it to the model to see by these where a sample starts, as
            those of transformers do without `attention_mask` and without a cache, and adds
            `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k` for flash-attention.
            "mask" adds `attention_mask`, (B, 1, L, L) float32, for other models, with eager
            attention or `scaled_dot_product_attention`.
        keep: fields of `PackedBatch` that are wanted besides, as "loss_weights", "cu_seqlens" or
            "images". Models take what they know.
        add_loss_weights: True lets the labels carry the loss weights, for
            `energon_lite.loss.weighted_causal_lm_loss`; False trains without them.

    Raises:
        ValueError: The packs have labels that are shifted already, or `attention` is unknown. A
            batch has loss weights that are not 0 or 1, which a model's own loss does not know, and
            `add_loss_weights` is None; or tensors that are no inputs of a model, and are not in
            `keep`.
    """

    packing: Packing
    attention: Attention = "position_ids"
    keep: tuple[str, ...] = ()
    add_loss_weights: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.packing.labels_are_shifted:
            raise ValueError("labels_are_shifted=True: Hugging Face models shift labels again.")

    def __call__(self, packs: Sequence[PackedSample]) -> dict[str, Any]:
        """Returns the inputs of a batch."""
        batch = PackedBatch.from_packs(packs, self.packing)
        return model_inputs(
            batch, self.attention, self.keep, add_loss_weights=self.add_loss_weights
        )
