"""Answers names and uses of other libraries that are not here: errors that say what to use."""

from __future__ import annotations

from typing import Any, NoReturn

# The names that other libraries have for a setting or method -> what to use here.
_ELSEWHERE = {
    "batch_size": "get_train_dataset(batch_size=n)",
    "collate_fn": "the method `batch` of a task encoder (task_encoder=...)",
    "drop_last": "batch_drop_last=True of get_train_dataset or get_val_dataset",
    "filter": "raise SkipSample() in the method `encode_sample` of a task encoder",
    "limit": "get_val_dataset(limit=n), or in training virtual_epoch_length=n or subset=(0, n)",
    "num_workers": "worker_config=WorkerConfig.default_worker_config(num_workers=n) of the dataset",
    "prefetch_factor": "get_loader(prefetch_factor=n)",
    "seed": "WorkerConfig(seed_offset=n)",
    "shuffle": "get_train_dataset, which shuffles, with shuffle_buffer_size=n to shuffle more or "
    "shuffle_over_epochs_multiplier=None for file order; get_val_dataset does not shuffle",
    **dict.fromkeys(("epochs", "max_epochs", "num_epochs"), "get_train_dataset(repeat=n)"),
    **dict.fromkeys(("map", "transform"), "the method `encode_sample` of a task encoder"),
    **dict.fromkeys(("rank", "world_size"), "WorkerConfig(rank=..., world_size=..., ...)"),
    **dict.fromkeys(("select", "take", "train_test_split"), "subset=(0, n) of get_train_dataset"),
}


def named_elsewhere(text: str, name: str, otherwise: str = "") -> str:
    """Returns the message for a name that is not there.

    Args:
        text: the start of the message.
        name: of an argument or method.
        otherwise: the end of the message, if nothing else is known by this name.
    """
    where = f": use {_ELSEWHERE[name]}" if name in _ELSEWHERE else otherwise
    return f"{text} {name!r}{where}"


def refuse_index(index: Any) -> NoReturn:
    """Refuses `dataset[index]`: samples have no numbers.

    Raises:
        TypeError: Always.
    """
    raise TypeError(
        f"dataset[{index!r:.40}]: the dataset is iterated and has no samples by number. Use "
        "next(iter(dataset)) to look at one; in place of Subset and random_split the split parts "
        "of get_train_dataset and get_val_dataset, or subset=(0, n)"
    )


def refuse_batch_index(index: Any) -> NoReturn:
    """Refuses `loader[index]`: batches have no numbers.

    Raises:
        TypeError: Always.
    """
    raise TypeError(
        f"loader[{index!r:.40}]: batches come by iteration, next(iter(loader)). A Trainer of "
        "transformers gets the dataset as train_dataset=, and the loader from its method "
        "get_train_dataloader (docs/trainers.md)"
    )


def refuse_copy(*_: Any) -> NoReturn:
    """Refuses to pickle or copy a loader, with what runs in it.

    Raises:
        TypeError: Always.
    """
    raise TypeError(
        "A loader cannot be pickled or copied. Send its dataset, loader.dataset, and make the "
        "loader there by get_savable_loader(dataset); its position is loader.state_dict()"
    )
