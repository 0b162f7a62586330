"""What became of recent requests, and where their time went."""
