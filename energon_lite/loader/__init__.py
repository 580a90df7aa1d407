"""Worker processes, and the state of a run."""
