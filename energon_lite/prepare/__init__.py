"""Turns a folder of tar files into a dataset: indexes, counts, split and sample type.

- `shards`: which tars a folder has.
- `splits`: which of them belong to which split part; pure functions on names.
- `config`: `dataset.yaml`, checked against the sample types.
- `plan`: all of that for one run, before a tar is read.
- `indexing`: what is in a tar, found in one pass and kept for a run that continues.
- `pool`: many tars in parallel processes.
- `dataset`: puts it together and writes `.nv-meta`, all or nothing.
"""

from energon_lite.prepare.run import PrepareReport, Progress, SplitCount, prepare_dataset

__all__ = ["PrepareReport", "Progress", "SplitCount", "prepare_dataset"]
