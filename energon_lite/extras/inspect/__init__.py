"""Reports about a dataset, for people and as JSON.

- `info.dataset_info`: what a prepared folder has, by `.nv-meta` only; needs no torch.
- `blend_info.metadataset_info`: what a metadataset has.
- `lint.lint_dataset`: reads everything and lists what is wrong.
- `forecast.plan`, `forecast.balance_report`: what a training run will read, and how long its ranks
  will wait.
"""
