"""Packages that no training step on tars needs; nothing else in the library imports them."""
