"""The user's hooks on samples and batches."""

from energon_lite.names.energon_modules import energon_names

__getattr__ = energon_names(__name__)
