"""Decides what each step computes. Pure: no torch, no clock, no I/O."""
