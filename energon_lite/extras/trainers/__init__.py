"""Adapters for single trainers: Accelerate, and the `Trainer` of transformers."""
