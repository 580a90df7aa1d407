"""The laws of every dataset, as one test that a dataset of ours or of a user's must pass.

```python
def test_my_dataset_keeps_the_laws() -> None:
    check_dataset(MyDataset(...))
```

The names (see testing.pyi) are imported when they are first used.
"""

from energon_lite.names.energon_modules import lazy_names, public_homes

__all__ = sorted(public_homes("testing.pyi"))

__getattr__ = lazy_names(__name__, public_homes("testing.pyi"))
