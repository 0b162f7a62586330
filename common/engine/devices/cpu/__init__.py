"""CPUs."""
