"""Reports of a run: what it read of each source, how fast, what it waited for, what to change."""
