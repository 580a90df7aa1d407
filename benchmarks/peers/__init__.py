"""Other loaders measured beside ours on the same samples: `make bench-peers`."""
