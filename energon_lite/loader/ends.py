"""Padding: batches that take part in a step, but whose samples do not count.

A padding batch repeats an earlier batch, and no row of it is valid. Its mask `valid` is False and
its loss weights are 0, so a loss or a metric that is weighted or masked does not change by it.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from itertools import islice
from typing import Any, Literal, get_args

import torch

from energon_lite.core.dataset import SavableDataset, StreamRun
from energon_lite.core.samples import PADDING, Batch, Sample
from energon_lite.core.state import digest
from energon_lite.core.topology import RankSlots, Stream, WorkerConfig, count_rank_items
from energon_lite.loader.rank_store import StoreVotes, Vote, group_store
from energon_lite.loader.resume import LoaderPosition
from energon_lite.loader.workers.rank_feed import Delivery, PassStart
from energon_lite.names.energon_modules import import_name
from energon_lite.stages.model_inputs import ModelInputs

VALID = "valid"
_WEIGHTS = ("loss_weight", "loss_weights")


def mark_valid(item: Any) -> bool:
    """Writes the mask `valid`, all True, on a batch that can carry it.

    Our samples and batches have it already. A dict gets an entry, another object an attribute: a
    bool tensor with an entry per row, `()` where no rows are seen. An own field of that name is
    left alone.

    Returns:
        Whether the batch carries the mask.
    """
    if isinstance(item, (Batch, Sample)):
        return not hasattr(type(item), VALID)
    if isinstance(item, ModelInputs):
        return False  # its model takes no mask
    fields = _fields(item)
    if fields is None or VALID in fields or hasattr(type(item), VALID):
        return False
    _set(item, VALID, torch.ones(_rows(fields), dtype=torch.bool, device="cpu"))
    return True


def as_padding(item: Any) -> Any:
    """Returns a copy of a batch of which no row is valid; its tensors are shared."""
    padding = copy.copy(item)
    if isinstance(item, (Batch, Sample)):
        fields = {name: getattr(item, name) for name in type(item).__dataclass_fields__}
        _set(padding, "__restore_key__", (PADDING, item.__restore_key__))
        _set(padding, "__loss_weight__", _zeros(item.__key__))
    else:
        fields = _fields(item)
        _set(padding, VALID, torch.zeros_like(fields[VALID]))
    for name in _WEIGHTS:
        if name in fields:
            _set(padding, name, _zeros(fields[name]))
    return padding


def _fields(item: Any) -> Any:
    """Returns what an object has, by name; None if it can take no more."""
    if isinstance(item, MutableMapping):
        return item
    if isinstance(item, torch.Tensor):
        return None
    return getattr(item, "__dict__", None)


def _set(item: Any, name: str, value: Any) -> None:
    if isinstance(item, MutableMapping):
        item[name] = value
    else:
        object.__setattr__(item, name, value)  # also where it is frozen


def _rows(fields: Any) -> tuple[int, ...]:
    """Returns the shape of a mask: (n,) for the first dimension that all tensors share."""
    tensors = [value for value in fields.values() if isinstance(value, torch.Tensor) and value.ndim]
    keys = fields.get("__key__")
    sizes = {len(tensor) for tensor in tensors} or ({len(keys)} if isinstance(keys, list) else ())
    return tuple(sizes) if len(sizes) == 1 else ()


def _zeros(weights: Any) -> Any:
    if isinstance(weights, torch.Tensor):
        return torch.zeros_like(weights)
    return [0.0] * len(weights) if isinstance(weights, list) else 0.0


End = Literal["drop", "pad", "uneven"]

logger = logging.getLogger(__name__)

# Imported for a pass without a batch.
_WARN = "energon_lite.extras.report.empty_pass:warn_of_empty_pass"
_HOW_TO_CHOOSE = 'Choose with get_loader(..., end="drop", "pad" or "uneven").'


class PassEnds:
    """The end of each finite pass of a rank.

    Args:
        dataset: the pipeline.
        config: the position of the rank.
        end: "drop" ends all ranks with the first that has no batch left; "pad" with the last, and
            the others repeat a batch of which no row is valid; "uneven" ends each by itself. None
            pads where ranks share a process group, or drops where batches cannot carry a mask
            or all ranks must have batches of one modality at a step; else it is uneven.

    Raises:
        ValueError: `end` is another value, or does not go with the data.
    """

    def __init__(
        self, dataset: SavableDataset[Any], config: WorkerConfig, end: End | None = None
    ) -> None:
        if end is not None and end not in get_args(End):
            raise ValueError(f"end={end!r} is not one of {', '.join(get_args(End))}, or None")
        if end is not None and dataset.endless:
            raise ValueError(
                f"end={end!r}, but the data never end: ranks always have a batch. Leave `end` out, "
                "or make the dataset with repeat=False"
            )
        if end == "pad" and dataset.traits.lockstep:
            raise ValueError(
                'end="pad", but batches of one modality must be the same on all ranks at each '
                'step, and a batch that is repeated is of another. Use end="drop", or '
                'ModalitySplit(lengths=..., end="pad"), which fills up steps'
            )
        self._dataset = dataset
        self._config = config
        self._end = end
        self._votes: StoreVotes | None = None
        self._has_logged = self._has_warned = False
        self._predicted: dict[Any, int] = {}
        self._learned: int | None = None

    def chosen(self) -> End:
        """Returns how the next pass ends."""
        if self._dataset.endless or (self._config.world_size == 1 and self._end != "pad"):
            return "uneven"
        if self._end is None and group_store(self._config) is not None:
            return "drop" if self._dataset.traits.lockstep else "pad"
        return self._end or "uneven"

    def begin(self, position: LoaderPosition) -> EvenPass | None:
        """Begins a pass, or resumes one; None if the rank ends by itself.

        Raises:
            RuntimeError: The ranks are to end together, but share no process group.
        """
        end = self.chosen()
        if end == "uneven":
            return None
        even = EvenPass(self._dataset, position, end, self._end is None)
        if self._config.world_size == 1:
            return even
        self._log(end)
        shared = group_store(self._config)
        if shared is None:
            raise RuntimeError(
                f"end={end!r}, but the {self._config.world_size} ranks share no process group to "
                "agree on the last step of a pass. Call torch.distributed.init_process_group "
                "before the loader is iterated (for part of its ranks also set "
                'WorkerConfig.data_parallel_group), or use end="uneven"'
            )
        if self._votes is None:
            name = digest(self._dataset.config())
            self._votes = StoreVotes(shared[0], name, self._config, shared[1])
        self._votes.begin_pass()
        even.votes = self._votes
        return even

    def num_steps(self, position: LoaderPosition) -> int:
        """Counts the batches of the rank in a pass; after the end of a pass, in the next one.

        Of endless data it is an epoch's.

        It is worked out before the pass, so samples that will be skipped or expanded are not
        predicted, and each sample counts as a list where packs, buckets and groups depend on what
        is read. If the last whole pass had another number, it is that.
        """
        if self._learned is not None:
            return self._learned
        start = position.start.after(self._dataset.training) if position.ended else position.start
        about = (start.slots.num_streams, start.pass_index, self.chosen())
        if about not in self._predicted:
            self._predicted = {about: self._predict(start)}
        return self._predicted[about]

    def learn(self, position: LoaderPosition) -> None:
        """Records how many batches a pass had that has just ended."""
        is_virtual = self._dataset.training and self._dataset.pass_length is not None
        is_whole = position.start.slots.base == 0 and not position.emitted  # and not resumed
        if is_whole and not position.num_steps and not self._has_warned:
            self._has_warned = True
            start = position.start.slots.num_streams, position.start.pass_index
            import_name(_WARN)(self._dataset, self._config, *start, self.chosen())
        if is_whole and not is_virtual:
            self._learned = None
            if position.num_steps != self.num_steps(position):
                self._learned = position.num_steps

    def _predict(self, start: PassStart) -> int:
        dataset, end, num_streams = self._dataset, self.chosen(), start.slots.num_streams
        if end == "uneven":
            config = dataclasses.replace(self._config, num_streams=num_streams)
            return count_rank_items(dataset, config, start.pass_index)
        limit = dataset.pass_length
        if limit is not None and dataset.training:
            return limit
        world_size = self._config.world_size
        streams = (Stream(index, num_streams, start.pass_index) for index in range(num_streams))
        counts = list(map(dataset.num_items, streams))
        ranks = [RankSlots(0, rank, world_size, num_streams) for rank in range(world_size)]
        if dataset.traits.lockstep:
            visits = [rank_visits(LoaderPosition(start), slots, counts) for slots in ranks]
            last = min(max(own, default=-1) for own in visits)
            steps = sum(visit <= last for visit in set.intersection(*map(set, visits)))
        else:
            steps = (min if end == "drop" else max)(s.count(counts) for s in ranks)
        return steps if limit is None else min(steps, limit)

    def _log(self, end: End) -> None:
        if self._has_logged or self._end is not None or self._config.rank:
            return
        self._has_logged = True
        pads = (
            "ranks that have run out repeat a batch, of which `valid` is False and loss weights 0"
        )
        drops = "with the first that has no batch left, and what others have left is dropped"
        logger.warning(
            "The %d ranks end each pass at the same step, so that no collective waits for ever: "
            "%s. %s",
            self._config.world_size, pads if end == "pad" else drops, _HOW_TO_CHOOSE,
        )  # fmt: skip


class EvenPass:
    """One pass of a rank that ends at the same step as that of all others.

    Args:
        dataset: the pipeline.
        position: where the pass begins or is resumed.
        end: "drop" or "pad".
        is_default: whether the user left `end` out; then a batch that cannot carry a mask
            changes padding into dropping.

    Attributes:
        end: "drop" or "pad".
        votes: where the ranks vote; None for a run of one rank.
    """

    def __init__(
        self, dataset: SavableDataset[Any], position: LoaderPosition, end: End, is_default: bool
    ) -> None:
        self.votes: StoreVotes | None = None
        self._dataset = dataset
        self._slots, self._pass_index = position.start.slots, position.start.pass_index
        self.end = end
        self._is_default = is_default
        self._is_aligned = dataset.traits.lockstep
        # Steps of this pass, or visits: the same number on all ranks.
        self._step = position.count if self._is_aligned else position.num_steps
        self._own: Delivery | None = None
        self._has_ended = False
        self._last: Any = None

    def forget(self) -> None:
        """Forgets a batch that was fetched but not yielded; it will be fetched again."""
        self._own = None
        self._has_ended = False

    def next(self, fetch: Callable[[], Delivery | None]) -> Delivery | None:
        """Returns the delivery of the next step; None after the last step of all ranks.

        Args:
            fetch: returns the rank's next delivery, or None at the end of its pass.

        Raises:
            TypeError: A batch cannot carry a mask.
            RuntimeError: A rank did not vote in time.
        """
        while True:
            own, step = self._fetched(fetch), self._step
            is_due = own is not None and (not self._is_aligned or self._turn(own) == step)
            num_ranks = self._slots.world_size
            sums = Vote(is_due, own is not None, self._can_pad)
            if self.votes is not None:
                sums = self.votes.cast(sums, step)
            self._step += 1
            if self.end == "pad" and sums.can_pad < num_ranks:
                self._drop_instead()
            if sums.is_left == 0 or (self.end == "drop" and sums.is_left < num_ranks):
                return None
            if is_due:
                self._own = None
            if self.end == "pad":
                if own is None:
                    return self._padding()
                self._last = copy.copy(own.item)  # as the user may change the batch
                return own
            if sums.has == num_ranks:
                return own

    def _fetched(self, fetch: Callable[[], Delivery | None]) -> Delivery | None:
        """Returns the rank's next delivery, which stays until it is yielded or dropped."""
        if self._own is None and not self._has_ended:
            own = fetch()
            while own is not None and self._is_aligned and self._turn(own) < self._step:
                own = fetch()  # it was dropped, and is computed again by other workers
            self._own, self._has_ended = own, own is None
            self._can_pad = self._marked()
        return self._own

    def _turn(self, own: Delivery) -> int:
        return self._slots.turn_of(own.slot)

    def end_pass(self, counts: tuple[int, int]) -> tuple[int, int]:
        """Ends the pass; returns the sums of two counts over ranks."""
        return counts if self.votes is None else self.votes.end_pass(counts)

    def _marked(self) -> bool:
        """Marks the batch that was fetched as valid, if padding is wanted and it has a position."""
        if self._own is None or self.end == "drop":
            return True
        can_pad = mark_valid(self._own.item)
        if not can_pad and not self._is_default:
            raise TypeError(
                f'end="pad" marks each batch with a mask `valid`, and a '
                f"{type(self._own.item).__name__} has no field for it, or uses that name "
                'already. Let encode_batch return a dict or a Batch; or use end="drop"'
            )
        return can_pad

    def _drop_instead(self) -> None:
        self.end = "drop"
        if self._slots.rank == 0:
            logger.warning(
                "Batches cannot carry a mask `valid`, so passes are not padded: they end with "
                "the first rank that has no batch left. %s",
                _HOW_TO_CHOOSE,
            )

    def _padding(self) -> Delivery:
        if self._last is None:
            self._last = first_batch(self._dataset, self._slots, self._pass_index)
        return Delivery(as_padding(self._last), -1, -1, None, [], [])


def rank_visits(position: LoaderPosition, slots: RankSlots, counts: list[int]) -> list[int]:
    """Lists the visits at which a rank has a batch that no rank emitted before.

    Args:
        position: where the pass begins.
        slots: of the rank.
        counts: the batches of each stream.
    """
    num_streams = slots.num_streams
    num_visits = max(0, -((slots.base - max(counts) * num_streams) // slots.world_size))
    return [
        visit
        for visit, slot in enumerate(islice(slots.turns(), num_visits))
        if slot // num_streams < counts[slot % num_streams] and not position.is_emitted(slot)
    ]


def first_batch(dataset: SavableDataset[Any], slots: RankSlots, pass_index: int) -> Any:
    """Computes the first batch of a pass, preferably of the rank's own streams."""
    for index in dict.fromkeys([*slots.streams(), *range(slots.num_streams)]):
        with suppress(StopIteration):
            stream = Stream(index, slots.num_streams, pass_index)
            item = next(StreamRun(dataset, stream, max_skip_rate=1))
            mark_valid(item)
            return item
    raise RuntimeError("No stream of this pass has a batch, but a rank voted that it has one.")
