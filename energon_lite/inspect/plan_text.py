"""A plan as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from energon_lite.inspect.plan import Plan, SourcePlan
from energon_lite.inspect.plan_draws import SHARES
from energon_lite.inspect.text import size_text

_UNKNOWN = "?"
# Of a thousand sources, a screenful.
_LISTED_WARNINGS = 20


def plan_text(plan: Plan) -> str:
    """Writes a plan: what comes of each source, shares over time, warnings."""
    lines = [_headline(plan), *_packs(plan), *_table(_source_rows(plan))]
    if len(plan.sources) > 1 and len(plan.stretches) > 1:
        what = "asked" if plan.kind == SHARES else "given"
        lines.append(f"shares of {plan.unit} {what}, over time:")
        lines += _table(_stretch_rows(plan))
    lines += [f"warning: {warning}" for warning in plan.warnings[:_LISTED_WARNINGS]]
    if len(plan.warnings) > _LISTED_WARNINGS:
        lines.append(f"and {len(plan.warnings) - _LISTED_WARNINGS:,} more warnings")
    return "\n".join(lines)


def _packs(plan: Plan) -> list[str]:
    packing = plan.packing
    if packing is None or plan.samples is None:
        return []
    mean = plan.samples / packing.packs if packing.packs else 0
    text = (
        f"packs of {_counted(packing.capacity, 'token')} by index {packing.lengths!r}: "
        f"{packing.fill:.2%} full, {mean:,.1f} samples each"
    )
    if packing.packs_per_pass is not None:
        text += f"; {_counted(packing.packs_per_pass, 'pack')} in a pass"
    if packing.left_out:
        text += f"; {_counted(packing.left_out, 'sample')} in none"
    return [text]


def _headline(plan: Plan) -> str:
    done = f"{plan.steps:,} of " if plan.steps < plan.steps_asked else ""
    what = "sample" if plan.packing is None else "pack"
    text = (
        f"{plan.path}, {plan.split_part}: {done}{_counted(plan.steps_asked, 'step')} of "
        f"{_counted(plan.world_size, 'rank')} x {_counted(plan.batch_size, what)}, from "
        f"{_counted(plan.num_streams, 'stream')}"
    )
    if plan.samples is None or plan.read_bytes is None:
        return f"{text} (only shares can be foreseen)"
    samples = _counted(plan.samples, "sample")
    return f"{text}: {samples}, {size_text(plan.read_bytes)} of tars ({plan.kind})"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _source_rows(plan: Plan) -> list[tuple[str, ...]]:
    has_tokens = any(source.tokens is not None for source in plan.sources)

    def row(source: SourcePlan) -> tuple[str, ...]:
        cells = [
            source.name, f"{source.size:,}", _percent(source.asked_share),
            _percent(source.given_share), _count(source.samples),
            _UNKNOWN if source.epochs is None else f"{source.epochs:,.2f}",
            _UNKNOWN if source.read_bytes is None else size_text(source.read_bytes),
        ]  # fmt: skip
        return (*cells, _count(source.tokens)) if has_tokens else tuple(cells)

    header = ("source", "size", "asked", "given", "samples", "epochs", "bytes")
    return [(*header, "tokens") if has_tokens else header, *map(row, plan.sources)]


def _stretch_rows(plan: Plan) -> list[tuple[str, ...]]:
    rows = [("from step", *(f"{stretch.start:,}" for stretch in plan.stretches))]
    for source in plan.sources:
        shares = (stretch.given or stretch.asked for stretch in plan.stretches)
        rows.append((source.name, *(_percent(found[source.name]) for found in shares)))
    return rows


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]  # fmt: skip


def _percent(share: float | None) -> str:
    return _UNKNOWN if share is None else f"{share:.2%}"


def _count(number: int | None) -> str:
    return _UNKNOWN if number is None else f"{number:,}"
