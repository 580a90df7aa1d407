"""Reports about a dataset, for people and as JSON.

- `info`: what a prepared folder has, by `.nv-meta` only; `blend_info`: what a metadataset has.
- `lint`: reads everything and lists what is wrong.
"""

from typing import TYPE_CHECKING

from energon_lite.names.lazy import lazy_names

if TYPE_CHECKING:
    from energon_lite.inspect.blend_info import metadataset_info
    from energon_lite.inspect.info import dataset_info
    from energon_lite.inspect.lint import LintProblem, LintReport, lint_dataset

__all__ = ["LintProblem", "LintReport", "dataset_info", "lint_dataset", "metadataset_info"]

_HOMES = {
    "LintProblem": "lint",
    "LintReport": "lint",
    "dataset_info": "info",
    "lint_dataset": "lint",
    "metadataset_info": "blend_info",
}
# Imported on first use: `info` needs no torch, and comes at once.
__getattr__ = lazy_names(__name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()})
