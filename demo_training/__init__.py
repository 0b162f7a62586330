"""Makes the demo model from scratch; not part of the distribution. `python -m demo_training.train --help` says how."""
