"""Which sample comes next: pure functions on integers."""
