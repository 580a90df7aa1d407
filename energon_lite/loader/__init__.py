"""Worker processes, and the state of a run."""

from energon_lite.names.energon_modules import energon_names

__getattr__ = energon_names(__name__)
