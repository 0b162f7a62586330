"""Makes the demo model from scratch, for a checkout alone: see `python -m tools.demo_training.train --help`."""
