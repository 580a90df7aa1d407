"""What the user's hooks do to samples and batches."""
