"""Reports as lines of text for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from energon_lite.core.tables import table_lines
from energon_lite.extras.view.words import counted, first_of, share_text, size_text
from energon_lite.formats.known import format_of
from energon_lite.formats.nvmeta import DEFAULT_DATASET, META

if TYPE_CHECKING:
    from energon_lite.extras.inspect.forecast import Plan
    from energon_lite.extras.inspect.lint import LintReport
    from energon_lite.extras.lengths.length_index import LengthReport
    from energon_lite.extras.prepare.prepare_media import MediaReport
    from energon_lite.extras.prepare.report import PrepareReport


_NO_INDEX = "; no index: every run reads the whole file first"
_INDEXED = {True: "; indexed", False: _NO_INDEX, None: ""}


def _amount(samples: int, shards: int) -> str:
    return f"{counted(samples, 'sample')} in {counted(shards, 'shard')}"


def prepared_text(report: PrepareReport) -> Iterator[str]:
    """Yields what `prepare_dataset` did."""
    amount, size = _amount(report.samples, report.shards), size_text(report.size_bytes)
    yield f"Prepared {report.path}: {amount}, {size}"
    if report.resumed_shards:
        yield f"  read by an earlier run: {counted(report.resumed_shards, 'shard')}"
    for name, split in report.splits.items():
        yield f"  {name}: {_amount(split.samples, split.shards)}"
    parts = [
        f"{name} ({count:,}{f' of {report.samples:,}' if count < report.samples else ''})"
        for name, count in report.parts.items()
    ]
    yield "  parts: " + ", ".join(first_of(parts, 10))
    if report.media_files is not None:
        yield f"  media metadata of {counted(report.media_files, 'file')}"
    yield f"  wrote {', '.join(report.written)}"
    yield from (f"  warning: {warning}" for warning in report.warnings)
    is_file = format_of(report.path).only_part is not None
    # This line is Energon's, which scripts look for.
    yield f"Done. Found {counted(report.samples, 'sample')}." if is_file else "Done"


def media_text(report: MediaReport) -> Iterator[str]:
    """Yields what `prepare_media` did."""
    kind = "webdataset" if report.is_webdataset else "filesystem dataset"
    yield f"Prepared {kind} {report.path}"
    yield from (f"  warning: {warning}" for warning in report.warnings)
    yield f"Done. Stored metadata for {report.stored} files."


def checkpoint_text(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields what `checkpoint_info` found."""
    states, num_files = report["states"], report["files"]
    kind = "Per-rank checkpoint files" if num_files > 1 else "One checkpoint file"
    yield f"Checkpoint type: {kind}, {counted(len(states), 'state')} of energon_lite"
    yield f"Number of DP ranks: {report['world_size']}"
    yield f"Number of streams: {report['num_streams']}"
    yield from (f"warning: {warning}" for warning in report["warnings"])
    yield "\nDetailed information:"
    for state in states:
        end = ", at the end" if state["ended"] else ""
        yield f"  Rank {state['rank']} ({state['file']}):"
        yield f"    Pass {state['pass']}{end}"
        yield f"    Batches since the pass, or a virtual epoch, began: {state['items_in_pass']:,}"
        yield f"    Batches since the topology last changed: {state['count']:,}"
        yield f"    Number of stream states: {state['streams']}"
        for name, row in state["sources"].items():
            read = f"{row['samples']:,} samples read (also into buffers)"
            yield f"    {name}: {read}, {row['skipped']:,} skipped"


def info_text(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields what `dataset_info` or `metadataset_info` found."""
    head = f"{report['name']}: {report['path']}"
    if "metadataset" in report:
        yield f"{head} (metadataset)"
        yield from _metadataset_lines(report["metadataset"])
        return
    samples, size = counted(report["samples"], "sample"), "size unknown, a shard is missing"
    if report["size_bytes"] is not None:
        size = size_text(report["size_bytes"])
    if "is_indexed" in report:
        name, index = format_of(PurePath(report["path"])).name, _INDEXED[report["is_indexed"]]
        yield f"{head} ({samples}, {size})\n  {name}, crude samples, in every split{index}"
        return
    yield f"{head} ({samples}, {size} in {counted(report['shards'], 'shard')})"
    yield f"  written by energon version: {report['energon_version'] or 'unknown'}"
    dataset = report["dataset"]
    if dataset is None:
        yield f"  sample type: none ({META}/{DEFAULT_DATASET} is missing)"
    else:
        label = "sample type" if dataset["kind"] == "samples" else "dataset class"
        yield f"  {label}: {dataset['class']} ({dataset['module']})"
        for name, access in (dataset["field_map"] or {}).items():
            yield f"    {name}: {access}"
    if report["parts"] is not None:
        yield "  parts:"
        for name, part in report["parts"].items():
            count = counted(part["count"], "member")
            yield f"    {name}: {count}, {size_text(part['size_bytes'])}"
    yield "  splits:" if report["splits"] else "  splits: none"
    for name, split in report["splits"].items():
        text = split.get("error")
        if text is None:
            text = f"{split['share']:.1%}, {_amount(split['samples'], split['shards'])}"
            if split["excluded_samples"]:
                text += f", {split['excluded_samples']:,} of them excluded"
        yield f"    {name}: {text}"


def _metadataset_lines(splits: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    for split, sources in splits.items():
        samples = counted(sum(source.get("samples", 0) for source in sources), "sample")
        yield f"  {split}: {samples} in {counted(len(sources), 'source')}"
        for source in sources:
            text = source.get("error")
            if text is None:
                amount = _amount(source["samples"], source["shards"])
                text = f"{amount}, part {source['split_part']!r} of {source['path']}"
                text += "".join(_blended_parts(source))
            yield f"    {source['name']}: {text}"


def _blended_parts(source: Mapping[str, Any]) -> Iterator[str]:
    if "shares" in source:
        places, shares = zip(*source["shares"], strict=True)
        unit = " of tokens" if source["unit"] == "tokens" else ""
        yield f"; target share{unit} {share_text(shares, places)}"
    if "loss_weight" in source:
        yield f"; loss weight {source['loss_weight']:g}"
    if "tokens" in source:
        yield f"; {counted(source['tokens'], 'token')}"


def lint_text(report: LintReport) -> Iterator[str]:
    """Yields what `lint_dataset` found, errors first."""
    problems = {"error": report.errors, "warning": report.warnings}
    for kind, found in problems.items():
        yield from (f"{kind}: {at}: {text}" for at, text in found)
    counts = ", ".join(counted(len(found), kind) for kind, found in problems.items())
    shards, samples = counted(report.shards, "shard"), counted(report.samples, "sample")
    yield f"{report.path}: {shards}, {samples} decoded ({report.failed_samples:,} failed), {counts}"


def lengths_text(report: LengthReport) -> Iterator[str]:
    """Yields what `measure_lengths` found of a split part."""
    sums = ", ".join(
        f"{total:,} {name} (longest {report.longest[name]:,})"
        for name, total in report.totals.items()
    )
    yield f"{report.path}, {report.split_part}: {counted(report.samples, 'sample')}, {sums}"
    if report.measured < report.samples:
        yield f"  measured before: {report.samples - report.measured:,} of them"
    if report.skipped or report.failed:
        yield f"  of length 0: {report.skipped:,} skipped, {report.failed:,} failed"
        yield from (f"    {sample}: {error}" for sample, error in report.problems)
    yield f"  {report.file}"


# A screenful of a thousand sources.
_LISTED_WARNINGS = 20
_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "size": ("size", "{:,}".format),
    "target_share": ("target", "{:.2%}".format),
    "actual_share": ("actual", "{:.2%}".format),
    "samples": ("samples", "{:,}".format),
    "epochs": ("epochs", "{:,.2f}".format),
    "read_bytes": ("bytes", size_text),
    "tokens": ("tokens", "{:,}".format),
}


def plan_text(plan: Plan) -> Iterator[str]:
    """Yields a plan: what is read of each source, shares over time, warnings."""
    yield _headline(plan)
    yield from _packs(plan)
    yield from _table(_source_rows(plan))
    if len(plan.sources) > 1 and len(plan.intervals) > 1:
        kind = "actual" if plan.drawn_steps else "target"
        yield f"{kind} shares of {plan.unit} over time:"
        rows = [("from step", *(f"{interval.start:,}" for interval in plan.intervals))]
        for source in plan.sources:
            shares = (interval.actual or interval.target for interval in plan.intervals)
            rows.append((source.name, *(f"{found[source.name]:.2%}" for found in shares)))
        yield from _table(rows)
    yield from first_of([f"warning: {w}" for w in plan.warnings], _LISTED_WARNINGS, " warnings")


def _headline(plan: Plan) -> str:
    done = f"{plan.steps:,} of " if plan.steps < plan.steps_requested else ""
    items = counted(plan.batch_size, "sample" if plan.packing is None else "pack")
    text = (
        f"{plan.path}, {plan.split_part}: {done}{counted(plan.steps_requested, 'step')} of "
        f"{counted(plan.world_size, 'rank')} x {items}, from {counted(plan.num_streams, 'stream')}"
    )
    if plan.samples is None or plan.read_bytes is None:
        return f"{text} (only shares can be predicted)"
    how = "exact"
    if plan.drawn_steps < plan.steps:
        how = f"exact for {plan.drawn_steps:,} steps, then extrapolated"
    samples = counted(plan.samples, "sample")
    return f"{text}: {samples}, {size_text(plan.read_bytes)} of tars ({how})"


def _packs(plan: Plan) -> Iterator[str]:
    packing = plan.packing
    if packing is None or plan.samples is None:
        return
    mean = plan.samples / packing.packs if packing.packs else 0
    text = (
        f"packs of {counted(packing.capacity, 'token')} by index {packing.lengths!r}: "
        f"{packing.fill:.2%} full, {mean:,.1f} samples each"
    )
    if packing.packs_per_pass is not None:
        text += f"; {counted(packing.packs_per_pass, 'pack')} in a pass"
    if packing.dropped:
        text += f"; {counted(packing.dropped, 'sample')} in none"
    yield text


def _source_rows(plan: Plan) -> list[tuple[str, ...]]:
    has_tokens = any(source.tokens is not None for source in plan.sources)
    names = [name for name in _COLUMNS if name != "tokens" or has_tokens]
    rows = [("source", *(_COLUMNS[name][0] for name in names))]
    for source in plan.sources:
        values = [(getattr(source, name), _COLUMNS[name][1]) for name in names]
        rows.append((source.name, *("?" if v is None else text(v) for v, text in values)))
    return rows


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    return [f"  {line}" for line in table_lines(rows)]


def joins_text(path: PurePath, joins: Sequence[tuple[PurePath, Any]]) -> Iterator[str]:
    """Yields how the samples of the joins of a metadataset match.

    Args:
        path: the metadataset.
        joins: for each join the file of its index, and a `JoinReport`, or None if it was there.
    """
    if not joins:
        yield f"{path} is a metadataset without mistakes; there is nothing to prepare"
    for file, report in dict(joins).items():
        if report is None:
            yield f"{file} is up to date"
            continue
        yield f"Joined {report.rows:,} of {counted(report.samples, 'sample')} in {file}"
        for name, missing in report.missing.items():
            keys = ", ".join(map(repr, report.listed[name]))
            as_keys = f", as {keys}" if keys else ""
            unused = counted(report.unused[name], "sample")
            yield f"  {name}: no match for {missing:,}{as_keys}; {unused} not used"
