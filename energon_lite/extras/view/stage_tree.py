"""A dataset or a loader as the tree of its stages, with sources, shares and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from energon_lite.core.dataset import AnyDataset, SavableDataset, SourceFacts
from energon_lite.core.stage import Stage
from energon_lite.core.user_function import UserFunction
from energon_lite.extras.view.words import counted, share_text, size_text
from energon_lite.loader.resume import decompressed
from energon_lite.order.schedules import Weights

_MAX_CHILDREN = 10  # of more datasets side by side the first are shown
# Settings that a user does not set or need not see, and settings that are clear without a name.
_HIDDEN = {
    "stage", "of", "seeded", "expands", "seed", "seed_offset", "lengths", "name", "unit",
    "end_of_data",
}  # fmt: skip
_NAMELESS = {"blend_mode", "algorithm"}


def saved_stages(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the settings of all stages that are in the state of a rank, and all dicts in them."""
    config = decompressed(state.get("config") or {}, "config")
    parts: list[Any] = [config]
    for part in parts:
        if isinstance(part, dict):
            yield part
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


def is_tree(value: Any) -> bool:
    """Whether a value is a dataset or a loader."""
    return isinstance(value, (SavableDataset, DataLoader))


def tree_lines(value: Any) -> list[str]:
    """Draws the stages of a dataset or loader, the last one first; starts and reads nothing.

    There is no line for a stage that only passes items on, or only calls a default hook.
    """
    if isinstance(value, SavableDataset):
        return _lines(value)
    config = value.worker_config
    worker = "thread" if config.worker_type == "thread" else "worker"
    sizes = f"{counted(config.num_workers, worker)}, {counted(value.num_streams, 'stream')}"
    head = f"{type(value).__name__}(rank {config.rank} of {config.world_size}, {sizes})"
    return _under(head, [_lines(value.dataset)])


def _under(text: str, branches: Sequence[list[str]]) -> list[str]:
    lines = [text]
    for number, (first, *rest) in enumerate(branches, 1):
        is_last = number == len(branches)
        lines.append(f"{'└─' if is_last else '├─'} {first}")
        lines += [f"{'   ' if is_last else '│  '}{line}" for line in rest]
    return lines


def _lines(dataset: AnyDataset) -> list[str]:
    children = dataset.children
    if not children:
        return [_leaf_text(dataset)]
    text = _stage_text(dataset)
    if len(children) > 1:
        return _under(text, _branches(dataset))
    below = _lines(children[0])
    return _under(text, [below]) if text else below


def _branches(dataset: AnyDataset) -> list[list[str]]:
    """Draws several datasets side by side, with their shares, and counts those above a limit."""
    children, shares = dataset.children, _branch_shares(dataset)
    num_shown = _MAX_CHILDREN if len(children) > _MAX_CHILDREN + 1 else len(children)
    width = max(map(len, shares[:num_shown]))
    branches = []
    for child, share in zip(children[:num_shown], shares, strict=False):
        above = []
        while len(child.children) == 1:  # the stages over a single source stand behind it
            above.append(_stage_text(child))
            child = child.children[0]
        first, *below = _lines(child)
        first = ", ".join([share.rjust(width) + first, *filter(None, above[::-1])])
        branches.append([first, *below])
    if num_shown < len(children):
        others = [facts for child in children[num_shown:] for facts in child.sources()]
        branches.append([f"and {len(children) - num_shown:,} more  {_amount_text(others)}"])
    return branches


def _leaf_text(dataset: AnyDataset) -> str:
    sources = dataset.sources()
    weights = {facts.loss_weight for facts in sources} - {1.0}
    loss = "".join(f", loss weight {weight:g}" for weight in weights)
    names = " + ".join(facts.name for facts in sources)
    return f"{names}  {_amount_text(sources)}{loss}" if sources else type(dataset).__name__


def _amount_text(sources: Sequence[SourceFacts]) -> str:
    size = sum(facts.num_bytes for facts in sources)
    samples = counted(sum(facts.num_samples for facts in sources), "sample")
    return f"{samples}, {size_text(size, 1)}" if size else samples


def _stage_text(dataset: AnyDataset) -> str:
    """Describes a stage by its settings and the functions of the user; "" if it has neither."""
    functions = list(filter(None, map(_function_text, dataset.functions)))
    details, length = _settings_texts(dataset), dataset.pass_length
    if length not in [child.pass_length for child in dataset.children]:
        details.append(f"{length:,} items of each rank in a pass")
    if isinstance(dataset, Stage) and not details and (dataset.functions or not dataset.name):
        return ", ".join(functions)
    title = type(dataset).__name__.removesuffix("Dataset").removesuffix("Lists")
    details += functions
    return f"{title}({', '.join(details)})" if details else title


def _settings_texts(dataset: AnyDataset) -> list[str]:
    found, texts = dataset.own_settings() if isinstance(dataset, Stage) else dataset.config(), []
    for name, value in found.items():
        words = name.removeprefix("batch_").replace("_", " ")
        if name in _HIDDEN or value is None or value is False or value == "forever":
            continue
        if isinstance(value, dict) and all(type(entry) is int for entry in value.values()):
            texts.append(f"{words} {', '.join(f'{entry:,} {of}' for of, entry in value.items())}")
        elif isinstance(value, (bool, int, float, str)):
            number = f"{value:,}" if type(value) is int else str(value)
            texts.append(
                words if value is True else number if name in _NAMELESS else f"{words} {number}"
            )
    return texts


def _function_text(user_function: UserFunction) -> str:
    """Names a hook and its task encoder, or a function; "" for a default hook."""
    function = user_function.function
    if (getattr(function, "__module__", "") or "").startswith("energon_lite.task_encoder"):
        return ""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{user_function.name} ({name if owner is None else type(owner).__name__})"


def _branch_shares(dataset: AnyDataset) -> list[str]:
    """Returns the share of each dataset in a blend, also over time; of others "" for each."""
    weights = vars(dataset).get("weights")
    if not isinstance(weights, Weights):
        return [""] * len(dataset.children)
    places = [0.0, *(x for x in weights.breaks.tolist() if x > 0)]
    try:
        return [f"{share_text(row, places)}  " for row in weights.at(np.array(places)).T.tolist()]
    except ValueError:  # all weights are 0 there
        return ["scheduled  "] * weights.num_leaves
