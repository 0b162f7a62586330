"""Messages between the parts of an engine: steps and their results."""
