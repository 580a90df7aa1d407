"""Reports as text for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from energon_lite.inspect.balance import BalanceReport
from energon_lite.inspect.lint import LintReport
from energon_lite.length_index import LengthReport
from energon_lite.prepare.dataset import PrepareReport
from energon_lite.storage.nvmeta import DEFAULT_DATASET, META


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
        f"{verb} {report.path}: {report.samples:,} samples in {report.shards:,} shards, "
        f"{size_text(report.size_bytes)}"
    ]
    if report.resumed_shards:
        lines.append(f"  {report.resumed_shards:,} shards were read by an earlier run")
    lines += [
        f"  {name}: {split.samples:,} samples in {split.shards:,} shards"
        for name, split in report.splits.items()
    ]
    lines.append("  parts: " + ", ".join(f"{k} ({v:,})" for k, v in report.parts.items()))
    lines.append(f"  {'would write' if report.is_dry_run else 'wrote'} {', '.join(report.written)}")
    lines += [f"  warning: {warning}" for warning in report.warnings]
    return "\n".join(lines)


def info_text(report: Mapping[str, Any]) -> str:
    """Writes what `dataset_info` gave."""
    size = "size unknown, a shard is missing"
    if report["size_bytes"] is not None:
        size = size_text(report["size_bytes"])
    lines = [
        f"{report['name']}: {report['path']} "
        f"({report['samples']:,} samples, {size} in {report['shards']:,} shards)",
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
            lines.append(f"    {name}: {part['count']:,} members, {size_text(part['size_bytes'])}")
    lines.append("  splits:" if report["splits"] else "  splits: none")
    for name, split in report["splits"].items():
        if "error" in split:
            lines.append(f"    {name}: {split['error']}")
            continue
        excluded = f", {split['excluded_samples']:,} of them excluded"
        lines.append(
            f"    {name}: {split['share']:.1%}, {split['samples']:,} samples in "
            f"{split['shards']:,} shards{excluded if split['excluded_samples'] else ''}"
        )
    return "\n".join(lines)


def lint_text(report: LintReport) -> str:
    """Writes what `lint_dataset` found, errors first."""
    lines = [f"error: {where}: {message}" for where, message in report.errors]
    lines += [f"warning: {where}: {message}" for where, message in report.warnings]
    lines.append(
        f"{report.path}: {report.shards:,} shards, {report.samples:,} samples decoded "
        f"({report.failed_samples:,} failed), {len(report.errors):,} errors, "
        f"{len(report.warnings):,} warnings"
    )
    return "\n".join(lines)


def lengths_text(report: LengthReport) -> str:
    """Writes what `measure_lengths` found of a split part."""
    sums = ", ".join(
        f"{total:,} {name} (longest {report.longest[name]:,})"
        for name, total in report.totals.items()
    )
    lines = [f"{report.path}, {report.split_part}: {report.samples:,} samples, {sums}"]
    if report.measured < report.samples:
        before = report.samples - report.measured
        lines.append(f"  {before:,} of them were measured before")
    if report.skipped or report.failed:
        lines.append(f"  of length 0: {report.skipped:,} skipped, {report.failed:,} failed")
        lines += [f"    {sample}: {error}" for sample, error in report.problems]
    lines.append(f"  {report.file}")
    return "\n".join(lines)


_BAR = 32


def balance_text(report: BalanceReport) -> str:
    """Writes what `balance_report` foresees, with a bar of the ranks' busy time for each order."""
    lines = [
        f"{report.path}: {report.ranks} ranks, {report.steps:,} steps, {report.samples:,} samples, "
        f"packs of {report.capacity:,} tokens"
    ]
    if report.overlong:
        lines.append(f"{report.overlong:,} samples are longer than a pack, and count as one")
    if report.skipped:
        lines.append(f"{report.skipped:,} samples have length 0, and are left out")
    width = max(len(row.name) for row in report.rows)
    lines.append(f"{'':{width}}  padding  imbalance    idle  busy")
    for row in report.rows:
        busy = round((1 - row.idle) * _BAR)
        lines.append(
            f"{row.name:{width}}  {1 - row.full:7.2%}  {row.imbalance:9.4f}  {row.idle:6.2%}  "
            f"{'█' * busy}{'·' * (_BAR - busy)}"
        )
    return "\n".join(lines)
