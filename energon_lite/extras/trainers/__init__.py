"""What single trainers need: Accelerate, and the `Trainer` of transformers."""
