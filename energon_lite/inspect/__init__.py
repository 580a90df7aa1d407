"""Reports about a dataset, for people and as JSON.

- `info`: what a prepared folder has; reads `.nv-meta` only.
- `lint`: reads everything and lists what is wrong.
"""

from energon_lite.inspect.info import dataset_info
from energon_lite.inspect.lint import LintProblem, LintReport, lint_dataset

__all__ = ["LintProblem", "LintReport", "dataset_info", "lint_dataset"]
