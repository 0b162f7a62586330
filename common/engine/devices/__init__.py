"""What a model runs on: one folder for each kind of device, behind the protocols beside it."""
