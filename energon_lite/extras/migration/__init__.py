"""Resumes with an edited blend: `restore_state(..., migrate=True)`."""
