"""What the user's hooks do to samples and batches."""

from energon_lite.names.energon_modules import energon_names

__getattr__ = energon_names(__name__)
