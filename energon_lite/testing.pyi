from energon_lite.extras.testing.laws import check_dataset
from energon_lite.extras.testing.reference_run import LawError, first_difference

__all__ = ["LawError", "check_dataset", "first_difference"]
