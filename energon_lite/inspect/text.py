"""Reports as text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from energon_lite.core.tables import table_lines
from energon_lite.storage.jsonl import is_jsonl
from energon_lite.storage.nvmeta import DEFAULT_DATASET, META

if TYPE_CHECKING:
    from energon_lite.inspect.forecast import BalanceReport, Plan
    from energon_lite.inspect.lint import LintReport
    from energon_lite.length_index import LengthReport
    from energon_lite.prepare.media import MediaReport
    from energon_lite.prepare.report import PrepareReport


def counted(count: int, what: str) -> str:
    """Writes a number of things: 1 shard, 2,000 shards."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def size_text(size: float) -> str:
    """Writes a number of bytes with two digits and its unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def prepared_text(report: PrepareReport) -> str:
    """Writes what `prepare_dataset` did."""
    verb = "Would prepare" if report.is_dry_run else "Prepared"
    lines = [
        f"{verb} {report.path}: {counted(report.samples, 'sample')} in "
        f"{counted(report.shards, 'shard')}, "
        f"{size_text(report.size_bytes)}"
    ]
    if report.resumed_shards:
        were = "was" if report.resumed_shards == 1 else "were"
        lines.append(f"  {counted(report.resumed_shards, 'shard')} {were} read by an earlier run")
    lines += [
        f"  {name}: {counted(split.samples, 'sample')} in {counted(split.shards, 'shard')}"
        for name, split in report.splits.items()
    ]
    parts = [
        f"{name} ({count:,}{f' of {report.samples:,}' if count < report.samples else ''})"
        for name, count in report.parts.items()
    ]
    if len(parts) > 10:
        parts[10:] = [f"and {len(parts) - 10:,} more"]
    lines.append("  parts: " + ", ".join(parts))
    if report.media_files is not None:
        lines.append(f"  media metadata of {counted(report.media_files, 'file')}")
    lines.append(f"  {'would write' if report.is_dry_run else 'wrote'} {', '.join(report.written)}")
    lines += [f"  warning: {warning}" for warning in report.warnings]
    # The last line is Energon's, which scripts look for.
    found = f". Found {counted(report.samples, 'sample')}." if is_jsonl(report.path) else ""
    lines += [] if report.is_dry_run else [f"Done{found}"]
    return "\n".join(lines)


def media_text(report: MediaReport) -> str:
    """Writes what `prepare_media` did."""
    kind = "webdataset" if report.is_webdataset else "filesystem dataset"
    lines = [f"Prepared {kind} {report.path}"]
    lines += [f"  warning: {warning}" for warning in report.warnings]
    return "\n".join([*lines, f"Done. Stored metadata for {report.stored} files."])


def checkpoint_text(report: Mapping[str, Any]) -> str:
    """Writes what `checkpoint_info` found."""
    states, num_files = report["states"], report["files"]
    kind = "Per-rank checkpoint files" if num_files > 1 else "One checkpoint file"
    lines = [
        f"Checkpoint type: {kind}, {counted(len(states), 'state')} of energon_lite",
        f"Number of DP ranks: {report['world_size']}",
        f"Number of streams: {report['num_streams']}",
        *(f"warning: {warning}" for warning in report["warnings"]),
        "",
        "Detailed information:",
    ]
    for state in states:
        end = ", at the end" if state["ended"] else ""
        lines += [
            f"  Rank {state['rank']} ({state['file']}):",
            f"    Pass {state['pass']}{end}",
            f"    Batches since the pass, or a virtual epoch, began: {state['items_in_pass']:,}",
            f"    Batches since the topology last changed: {state['count']:,}",
            f"    Number of stream states: {state['streams']}",
        ]
        lines += [
            f"    {name}: {row['samples']:,} samples read (also into buffers), "
            f"{row['skipped']:,} skipped"
            for name, row in state["sources"].items()
        ]
    return "\n".join(lines)


def info_text(report: Mapping[str, Any]) -> str:
    """Writes what `dataset_info` found."""
    if "metadataset" in report:
        return _metadataset_text(report)
    if "is_indexed" in report:
        return _lines_text(report)
    size = "size unknown, a shard is missing"
    if report["size_bytes"] is not None:
        size = size_text(report["size_bytes"])
    lines = [
        f"{report['name']}: {report['path']} "
        f"({counted(report['samples'], 'sample')}, {size} in {counted(report['shards'], 'shard')})",
        f"  written by energon version: {report['energon_version'] or 'unknown'}",
    ]
    dataset = report["dataset"]
    if dataset is None:
        lines.append(f"  sample type: none ({META}/{DEFAULT_DATASET} is missing)")
    else:
        label = "sample type" if dataset["kind"] == "samples" else "dataset class"
        lines.append(f"  {label}: {dataset['class']} ({dataset['module']})")
        for name, access in (dataset["field_map"] or {}).items():
            lines.append(f"    {name}: {access}")
    if report["parts"] is not None:
        lines.append("  parts:")
        for name, part in report["parts"].items():
            lines.append(
                f"    {name}: {counted(part['count'], 'member')}, {size_text(part['size_bytes'])}"
            )
    lines.append("  splits:" if report["splits"] else "  splits: none")
    for name, split in report["splits"].items():
        if "error" in split:
            lines.append(f"    {name}: {split['error']}")
            continue
        excluded = f", {split['excluded_samples']:,} of them excluded"
        lines.append(
            f"    {name}: {split['share']:.1%}, {counted(split['samples'], 'sample')} in "
            f"{counted(split['shards'], 'shard')}{excluded if split['excluded_samples'] else ''}"
        )
    return "\n".join(lines)


def _lines_text(report: Mapping[str, Any]) -> str:
    index = "indexed" if report["is_indexed"] else "no index: every run reads the whole file first"
    return (
        f"{report['name']}: {report['path']} ({counted(report['samples'], 'sample')}, "
        f"{size_text(report['size_bytes'])})\n  JSONL, crude samples, in every split; {index}"
    )


def _metadataset_text(report: Mapping[str, Any]) -> str:
    lines = [f"{report['name']}: {report['path']} (metadataset)"]
    for split, sources in report["metadataset"].items():
        samples = sum(source.get("samples", 0) for source in sources)
        lines.append(
            f"  {split}: {counted(samples, 'sample')} in {counted(len(sources), 'source')}"
        )
        for source in sources:
            what = source.get("error") or (
                f"{counted(source['samples'], 'sample')} in {counted(source['shards'], 'shard')}, "
                f"part {source['split_part']!r} of {source['path']}"
            )
            lines.append(f"    {source['name']}: {what}")
    return "\n".join(lines)


def lint_text(report: LintReport) -> str:
    """Writes what `lint_dataset` found, errors first."""
    lines = [f"error: {where}: {message}" for where, message in report.errors]
    lines += [f"warning: {where}: {message}" for where, message in report.warnings]
    lines.append(
        f"{report.path}: {counted(report.shards, 'shard')}, {counted(report.samples, 'sample')} "
        f"decoded ({report.failed_samples:,} failed), {counted(len(report.errors), 'error')}, "
        f"{counted(len(report.warnings), 'warning')}"
    )
    return "\n".join(lines)


def lengths_text(report: LengthReport) -> str:
    """Writes what `measure_lengths` found of a split part."""
    sums = ", ".join(
        f"{total:,} {name} (longest {report.longest[name]:,})"
        for name, total in report.totals.items()
    )
    lines = [f"{report.path}, {report.split_part}: {counted(report.samples, 'sample')}, {sums}"]
    if report.measured < report.samples:
        before = report.samples - report.measured
        lines.append(f"  {before:,} of them {'was' if before == 1 else 'were'} measured before")
    if report.skipped or report.failed:
        lines.append(f"  of length 0: {report.skipped:,} skipped, {report.failed:,} failed")
        lines += [f"    {sample}: {error}" for sample, error in report.problems]
    lines.append(f"  {report.file}")
    return "\n".join(lines)


_BAR = 32


def balance_text(report: BalanceReport) -> str:
    """Writes what `balance_report` predicts, with a bar of the ranks' busy time for each order."""
    sizes = {"rank": report.ranks, "step": report.steps, "sample": report.samples}
    counts = ", ".join(counted(size, what) for what, size in sizes.items())
    lines = [f"{report.path}: {counts}, packs of {counted(report.capacity, 'token')}"]
    if report.overlong:
        are, count = ("is", "counts") if report.overlong == 1 else ("are", "count")
        samples = counted(report.overlong, "sample")
        lines.append(f"{samples} {are} longer than a pack, and {count} as long as one")
    if report.skipped:
        have, are = ("has", "is") if report.skipped == 1 else ("have", "are")
        lines.append(f"{counted(report.skipped, 'sample')} {have} length 0, and {are} skipped")
    width = max(len(row.name) for row in report.rows)
    lines.append(f"{'':{width}}  padding  imbalance    idle  busy")
    for row in report.rows:
        busy = round((1 - row.idle) * _BAR)
        lines.append(
            f"{row.name:{width}}  {1 - row.full:7.2%}  {row.imbalance:9.4f}  {row.idle:6.2%}  "
            f"{'█' * busy}{'·' * (_BAR - busy)}"
        )
    return "\n".join(lines)


# Of a thousand sources, a screenful.
_LISTED_WARNINGS = 20


def plan_text(plan: Plan) -> str:
    """Writes a plan: what is read of each source, shares over time, warnings."""
    lines = [_headline(plan), *_packs(plan), *_table(_source_rows(plan))]
    if len(plan.sources) > 1 and len(plan.intervals) > 1:
        lines.append(
            f"{'actual' if plan.drawn_steps else 'target'} shares of {plan.unit} over time:"
        )
        rows = [("from step", *(f"{interval.start:,}" for interval in plan.intervals))]
        for source in plan.sources:
            shares = (interval.actual or interval.target for interval in plan.intervals)
            rows.append((source.name, *(f"{found[source.name]:.2%}" for found in shares)))
        lines += _table(rows)
    lines += [f"warning: {warning}" for warning in plan.warnings[:_LISTED_WARNINGS]]
    if len(plan.warnings) > _LISTED_WARNINGS:
        lines.append(f"and {len(plan.warnings) - _LISTED_WARNINGS:,} more warnings")
    return "\n".join(lines)


def _headline(plan: Plan) -> str:
    done = f"{plan.steps:,} of " if plan.steps < plan.steps_requested else ""
    what = "sample" if plan.packing is None else "pack"
    text = (
        f"{plan.path}, {plan.split_part}: {done}{counted(plan.steps_requested, 'step')} of "
        f"{counted(plan.world_size, 'rank')} x {counted(plan.batch_size, what)}, from "
        f"{counted(plan.num_streams, 'stream')}"
    )
    if plan.samples is None or plan.read_bytes is None:
        return f"{text} (only shares can be predicted)"
    how = "exact"
    if plan.drawn_steps < plan.steps:
        how = f"exact for {plan.drawn_steps:,} steps, then extrapolated"
    samples = counted(plan.samples, "sample")
    return f"{text}: {samples}, {size_text(plan.read_bytes)} of tars ({how})"


def _packs(plan: Plan) -> list[str]:
    packing = plan.packing
    if packing is None or plan.samples is None:
        return []
    mean = plan.samples / packing.packs if packing.packs else 0
    text = (
        f"packs of {counted(packing.capacity, 'token')} by index {packing.lengths!r}: "
        f"{packing.fill:.2%} full, {mean:,.1f} samples each"
    )
    if packing.packs_per_pass is not None:
        text += f"; {counted(packing.packs_per_pass, 'pack')} in a pass"
    if packing.dropped:
        text += f"; {counted(packing.dropped, 'sample')} in none"
    return [text]


def _source_rows(plan: Plan) -> list[tuple[str, ...]]:
    header = ("source", "size", "target", "actual", "samples", "epochs", "bytes", "tokens")
    rows = [
        (
            source.name, f"{source.size:,}", f"{source.target_share:.2%}",
            _known(source.actual_share, ".2%"), _known(source.samples, ","),
            _known(source.epochs, ",.2f"),
            "?" if source.read_bytes is None else size_text(source.read_bytes),
            _known(source.tokens, ","),
        )
        for source in plan.sources
    ]  # fmt: skip
    has_tokens = any(source.tokens is not None for source in plan.sources)
    return [row if has_tokens else row[:-1] for row in (header, *rows)]


def _known(number: float | None, form: str) -> str:
    return "?" if number is None else format(number, form)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    return [f"  {line}" for line in table_lines(rows)]


def joins_text(path: Path, joins: Sequence[tuple[Path, Any]]) -> str:
    """Returns how the samples of the joins of a metadataset match.

    Args:
        path: the metadataset.
        joins: for each join the file of its index, and a `JoinReport`, or None if it was there.
    """
    if not joins:
        return f"{path} is a metadataset without mistakes; there is nothing to prepare"
    lines = []
    for file, report in dict(joins).items():
        if report is None:
            lines.append(f"{file} is up to date")
            continue
        lines.append(f"Joined {report.rows:,} of {counted(report.samples, 'sample')} in {file}")
        for name, missing in report.missing.items():
            keys = ", ".join(map(repr, report.listed[name]))
            as_keys = f", as {keys}" if keys else ""
            unused = counted(report.unused[name], "sample")
            lines.append(f"  {name}: no match for {missing:,}{as_keys}; {unused} not used")
    return "\n".join(lines)
