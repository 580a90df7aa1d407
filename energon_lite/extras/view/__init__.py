"""Plain descriptions of samples, batches and packs, which pages, terminals and notebooks draw."""
