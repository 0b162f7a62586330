"""Programs that make parts of the repository. Not in the distribution."""
