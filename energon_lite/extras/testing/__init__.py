"""The laws of every dataset, as a test for stages of ours and of users."""
