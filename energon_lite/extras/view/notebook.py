"""Samples, batches, packs and datasets as HTML for notebooks; all text of data is escaped."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import suppress
from html import escape
from itertools import islice
from typing import Any

from energon_lite.extras.view.fields import short_text, view_of, walked
from energon_lite.extras.view.media_bytes import picture_bytes
from energon_lite.extras.view.reprs import brief, fields_in_repr, head_of, is_pack
from energon_lite.extras.view.segments import runs_of
from energon_lite.extras.view.stage_tree import is_tree
from energon_lite.names.energon_modules import Described

_EDGE_PIXELS, _MAX_PICTURES, _MAX_FIELDS, _MAX_ROWS = 256, 4, 40, 16
_ROW = "display:flex;height:1.2em;margin:2px 0;max-width:60em"
_PADDING = "repeating-linear-gradient(45deg,#8886 0 2px,#8882 2px 6px)"


def html_of(value: Any) -> str:
    """Returns a sample with its pictures, a pack as coloured segments, or a tree of stages.

    Pictures have at most 256 pixels in each direction. Where a class defines `__repr__`, its text
    is shown. Never raises.
    """
    try:
        if is_tree(value) or vars(Described)["__repr__"] is not type(value).__repr__:
            return f"<pre>{escape(repr(value))}</pre>"
        return _item_html(value)
    except Exception:  # a notebook would show an error instead of the result of a cell
        return f"<pre>{escape(object.__repr__(value))}</pre>"


def _item_html(item: Any) -> str:
    parts = [f"<b>{escape(type(item).__name__)}</b> {escape(', '.join(head_of(item)))}"]
    if is_pack(item) and not item.segment_ids.is_meta:
        numbers = item.segment_ids.reshape(-1, item.segment_ids.shape[-1]).cpu().numpy()
        keys = iter(getattr(item, "__keys__", item.__key__))
        parts += [_row_html(row, keys) for row in numbers[:_MAX_ROWS]]
        if len(numbers) > _MAX_ROWS:
            parts.append(f"<div>and {len(numbers) - _MAX_ROWS:,} more rows</div>")
        parts += map(_picture_html, item.images[:_MAX_PICTURES])
    fields = fields_in_repr(item)
    cells = [
        f'<tr><th style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left;white-space:pre-wrap">{_value_html(value)}</td></tr>'
        for name, value in islice(fields.items(), _MAX_FIELDS)
    ]
    if len(fields) > _MAX_FIELDS:
        cells.append(f"<tr><td>and {len(fields) - _MAX_FIELDS:,} more fields</td></tr>")
    return f"<div>{''.join(parts)}</div><table>{''.join(cells)}</table>"


def _value_html(value: Any) -> str:
    with suppress(Exception):  # an odd array is only named
        views = [view for _, view in walked([view_of("", value)])]
        pictures = (view.value for view in views if view.kind == "picture")
        drawn = "".join(map(_picture_html, islice(pictures, _MAX_PICTURES)))
        if views[0].kind == "text":
            return escape(short_text(value))
        is_played = views[0].kind in ("audio", "video")
        return f"{drawn}<div>{escape(views[0].summary if is_played else brief(value))}</div>"
    return f"<div>{escape(brief(value))}</div>"


def _picture_html(picture: Any) -> str:
    with suppress(Exception):  # one that cannot be drawn is described only
        raw, media_type = picture_bytes(picture, _EDGE_PIXELS)
        data = base64.b64encode(raw).decode()
        return f'<img alt="" src="data:{media_type};base64,{data}" style="margin:2px">'
    return ""


def _row_html(numbers: Any, keys: Iterator[str]) -> str:
    """Draws a row of a pack: a bar for each sample, as wide as its part of the tokens.

    `batch_view`, which is for pages, describes each token; a large batch would take seconds.

    Args:
        numbers: shape (L,); the number of each token's sample in the row, 0 for padding.
        keys: of the samples, those of this row next.
    """
    bars = []
    for start, stop, number in runs_of(numbers):
        title = escape(f"{next(keys, '') if number else 'padding'}: {stop - start:,} tokens")
        # The golden angle: neighbours have unlike colours.
        colour = f"hsl({number * 137.5 % 360:.0f} 60% 55%)" if number else _PADDING
        bars.append(
            f'<span title="{title}" style="flex:{stop - start};background:{colour}"></span>'
        )
    return f'<div style="{_ROW}">{"".join(bars)}</div>'
