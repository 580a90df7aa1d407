"""The laws of every dataset, as one test that a dataset of ours or of a user's must pass.

```python
def test_my_dataset_keeps_the_laws() -> None:
    check_dataset(MyDataset(...))
```
"""

from energon_lite.testing.laws import check_dataset
from energon_lite.testing.reference_run import LawError, first_difference

__all__ = ["LawError", "check_dataset", "first_difference"]
