"""Pure functions and collectors that choose, from arrays of lengths, which samples share a list."""
