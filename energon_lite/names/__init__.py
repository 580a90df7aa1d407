"""What is found where: names that are imported when first used, and Energon's modules."""
