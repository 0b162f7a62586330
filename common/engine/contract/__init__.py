"""What the parts of an engine say to each other: steps and their results."""
