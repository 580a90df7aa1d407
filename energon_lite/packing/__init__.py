"""Pure functions on arrays of lengths: which samples share a pack."""
