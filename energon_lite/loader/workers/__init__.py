"""Who computes the deliveries of a rank."""
