"""One file per loader: the packages it needs, how it stores samples, and how it reads them.

Each module has:

- `TITLE`, and `PACKAGES`, which pip installs into the loader's environment (`SHOWN` has the names
  whose versions are printed, if they are others), or also `ENVIRONMENT_OF` for that of another;
- `prepare(sources, folder)`, which writes each sequence of samples in the loader's format, or
  `DATA_OF`, the loader whose files it reads;
- `open_loader(folder, row)`, which returns an iterable of batches of one epoch or without end;
- `samples_of(batch, row)`, which returns the texts, bytes or pictures of a batch;
- `lacks(row)`, which returns why the loader has nothing for a row, or "";
- `IS_TRANSPORT_ALONE` if workers only send one batch again and again, which no check can compare.
"""

LOADERS = (
    "ours",
    "ours_threads",
    "megatron_energon",
    "webdataset_",
    "mosaicml_streaming",
    "litdata_",
    "grain_",
    "huggingface",
    "spdl_",
    "by_hand",
)
