"""Plain descriptions of samples, batches and packs, which pages and terminals draw."""
