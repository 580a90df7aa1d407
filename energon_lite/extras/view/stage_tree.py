"""A dataset or a loader as the tree of its stages, with sources, shares and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader

from energon_lite.core.dataset import AnyDataset, SavableDataset, SourceFacts
from energon_lite.core.stage import Stage
from energon_lite.core.user_function import UserFunction
from energon_lite.extras.view.words import counted, size_text
from energon_lite.order.schedules import Weights

# Of more datasets side by side the first are shown; of a schedule, this many shares.
_MAX_CHILDREN, _MAX_SHARES = 10, 4
_MAX_NAME = 80
# Settings that users do not set or need not see, and settings whose value is clear without a name.
_HIDDEN = {
    "stage",
    "of",
    "seeded",
    "expands",
    "seed_offset",
    "lengths",
    "name",
    "unit",
    "end_of_data",
}
_NAMELESS = {"blend_mode", "algorithm"}
_UNTIL = {"first": "until one ends", "all_once": "until each has ended", "forever": ""}


class _Node(NamedTuple):
    """A line of the tree, with what lies below."""

    text: str
    below: Sequence[_Node] = ()

    def lines(self) -> list[str]:
        """Draws the tree."""
        found = [self.text]
        for number, node in enumerate(self.below):
            is_last = number == len(self.below) - 1
            first, *rest = node.lines()
            found.append(f"{'└─' if is_last else '├─'} {first}")
            found += [f"{'   ' if is_last else '│  '}{line}" for line in rest]
        return found


def is_tree(value: Any) -> bool:
    """Whether a value is a dataset or a loader."""
    return isinstance(value, (SavableDataset, DataLoader))


def tree_lines(value: Any) -> list[str]:
    """Draws the stages of a dataset or loader, the last one first; starts and reads nothing.

    Of stages that only pass items on, and of those that only call a default hook, there is no line.
    """
    if isinstance(value, SavableDataset):
        return _node(value).lines()
    config, loader = value.worker_config, type(value).__name__
    worker = "thread" if config.worker_type == "thread" else "worker"
    sizes = [counted(config.num_workers, worker), counted(value.num_streams, "stream")]
    head = f"{loader}(rank {config.rank} of {config.world_size}, {', '.join(sizes)})"
    return _Node(head, [_node(value.dataset)]).lines()


def _node(dataset: AnyDataset) -> _Node:
    """Describes a dataset and all that is below; a stage without a text is passed over."""
    children = dataset.children
    text = _stage_text(dataset) if children else _leaf_text(dataset)
    if len(children) == 1:
        below = _node(children[0])
        return _Node(text, [below]) if text else below
    return _Node(text, _branches(dataset)) if children else _Node(text)


def _branches(dataset: AnyDataset) -> list[_Node]:
    """Describes several datasets side by side, a line each: with its share, source first."""
    children, shares = dataset.children, _branch_shares(dataset)
    num_shown = _MAX_CHILDREN if len(children) > _MAX_CHILDREN + 1 else len(children)
    nodes = [_source_first(_node(child)) for child in children[:num_shown]]
    width = max(map(len, shares[:num_shown]), default=0)
    if shares:
        pairs = zip(nodes, shares, strict=False)
        nodes = [_Node(f"{share:>{width}}  {node.text}", node.below) for node, share in pairs]
    if num_shown < len(children):
        rest = [facts for child in children[num_shown:] for facts in child.sources()]
        nodes.append(_Node(f"and {len(children) - num_shown:,} more  {_amount_text(rest)}"))
    return nodes


def _source_first(node: _Node) -> _Node:
    """Puts the stages over a single source behind it, into its line."""
    above = []
    while len(node.below) == 1:
        above.append(node.text)
        node = node.below[0]
    return _Node(", ".join([node.text, *reversed(above)]), node.below)


def _leaf_text(dataset: AnyDataset) -> str:
    sources = dataset.sources()
    if not sources:
        return type(dataset).__name__
    names = " + ".join(facts.name[-_MAX_NAME:] for facts in sources)
    weights = {facts.loss_weight for facts in sources} - {1.0}
    loss = f", loss weight {', '.join(f'{weight:g}' for weight in weights)}" if weights else ""
    return f"{names}  {_amount_text(sources)}{loss}"


def _amount_text(sources: Sequence[SourceFacts]) -> str:
    size = sum(facts.num_bytes for facts in sources)
    samples = counted(sum(facts.num_samples for facts in sources), "sample")
    return f"{samples}, {size_text(size, 1)}" if size else samples


def _stage_text(dataset: AnyDataset) -> str:
    """Describes a stage by its settings and the functions of the user; "" if it has neither."""
    functions = [_function_text(f) for f in dataset.functions if not _is_default_hook(f)]
    details = _settings(dataset)
    ends = [child.pass_length for child in dataset.children]
    if dataset.pass_length not in ends:
        details.append(f"{dataset.pass_length:,} items of each rank in a pass")
    title = type(dataset).__name__.removesuffix("Dataset").removesuffix("Lists")
    if isinstance(dataset, Stage) and not details and (dataset.functions or not dataset.name):
        return ", ".join(functions)
    details += functions
    return f"{title}({', '.join(details)})" if details else title


def _settings(dataset: AnyDataset) -> list[str]:
    found = dataset.own_settings() if isinstance(dataset, Stage) else dataset.config()
    title, texts = f"{found.get('stage', getattr(dataset, 'name', ''))}_", []
    for name, value in found.items():
        if name in _HIDDEN or value is None or value is False:
            continue
        words = name.removeprefix(title).replace("_", " ")
        if name == "until":
            texts.append(_UNTIL.get(str(value), f"until {value}"))
        elif name in _NAMELESS:
            texts.append(str(value))
        elif isinstance(value, dict) and all(type(entry) is int for entry in value.values()):
            texts.append(f"{words} {', '.join(f'{entry:,} {of}' for of, entry in value.items())}")
        elif isinstance(value, (bool, int, float, str)):
            number = f"{value:,}" if type(value) is int else str(value)[:_MAX_NAME]
            texts.append(words if value is True else f"{words} {number}")
    return [text for text in texts if text]


def _is_default_hook(function: UserFunction) -> bool:
    module = getattr(function.function, "__module__", None) or ""
    return module.startswith("energon_lite.task_encoder")


def _function_text(user_function: UserFunction) -> str:
    """Names a hook and its task encoder, or what stands for it and the function."""
    function = user_function.function
    owner = getattr(function, "__self__", None)
    is_hook = owner is not None and not isinstance(owner, type)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    of = type(owner).__name__ if is_hook else name.replace("<locals>.", "")
    return f"{user_function.name} ({of[-_MAX_NAME:]})"


def _branch_shares(dataset: AnyDataset) -> list[str]:
    """Returns the share of each dataset in a blend, also over time; nothing of others."""
    weights = vars(dataset).get("weights")
    if not isinstance(weights, Weights):
        return []
    places = np.unique([0.0, *weights.breaks.tolist()])
    with suppress(ValueError):  # all weights are 0 there
        return [_share_text(row, places) for row in weights.at(places).T.tolist()]
    return ["scheduled"] * weights.num_leaves


def _share_text(shares: list[float], places: Any) -> str:
    steps = [
        (share, place)
        for share, before, place in zip(shares, [None, *shares], places.tolist(), strict=False)
        if before is None or abs(share - before) > 1e-9
    ]
    # Of a thousand sources, some have a share of 0.0002 %.
    texts = [f"{100 * s:.1f} %" if s > 5e-4 or s == 0 else f"{100 * s:.1g} %" for s, _ in steps]
    if len(texts) == 1:
        return texts[0]
    if len(texts) > _MAX_SHARES:
        texts[_MAX_SHARES - 2 : -1] = ["..."]
    return f"{' → '.join(texts)} over {steps[-1][1]:,.0f} samples"
