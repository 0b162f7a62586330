"""Who computes what in a step. Pure: no torch, no clock, no I/O."""
