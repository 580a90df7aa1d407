"""Turns a folder of tar files into a dataset: indexes, counts, split and sample type.

- `choose_shards`: which tars a folder has, and which split part each belongs to.
- `decisions`: all of that for one run, with `dataset.yaml`, before a tar is read.
- `indexing`: what is in a tar, found in one pass and kept for a run that resumes; other sample
  keys for tars that share some.
- `lines`: the index of a JSONL file.
- `pool`: many tars in parallel processes.
- `report`: what was found and written.
- `run`: puts it together and writes `.nv-meta`, all or nothing; also as Energon's class does.
"""

from energon_lite.names.energon_modules import lazy_names

_HOMES = {"PrepareReport": "report", "SplitCount": "report", "Progress": "decisions"}
_HOMES["prepare_dataset"] = "run"
__getattr__ = lazy_names(__name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()})
