"""Devices that models run on: one folder for each kind, behind the protocols beside it."""
