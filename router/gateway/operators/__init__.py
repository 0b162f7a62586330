"""What operators ask for, and clients about their own requests."""
