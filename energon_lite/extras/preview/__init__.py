"""A page in the browser: the samples of a dataset, and its batches as the model sees them.

- `browse`: samples by source, in the order of the files or of the run; jump to a key; search.
- `slots`: the batches of a run, also from a saved state.
- `charts`: shares over time, epochs, lengths, sizes of pictures, fill of packs.
- `server`: the page itself, for this machine only.
"""
