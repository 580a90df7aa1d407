"""Batches of samples of like lengths: how they are cut from a window, and their settings."""
