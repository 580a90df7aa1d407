"""Data in object stores: addresses, the process that fetches, and copies on this machine."""
