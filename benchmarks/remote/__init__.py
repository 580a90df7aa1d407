"""Data in object stores, measured through the loader from a server with latency and bandwidth."""
