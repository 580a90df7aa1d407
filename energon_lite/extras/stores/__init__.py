"""File stores, and caches of what is read from them."""
