"""Loading that runs on a Ray cluster: workers, shared batches, and work on many files."""
