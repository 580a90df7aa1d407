"""JSONL files: their format, their index, and their lines as sources of crude samples."""
