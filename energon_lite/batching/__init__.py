"""Which samples share a list: pure functions and collectors on arrays of lengths."""
