"""The demo model that ships with Baton: a tiny chat model, small enough to live in the repository.

`python -m tools.demo_training.train` makes it from scratch, in a checkout of the repository.
"""

from pathlib import Path

DEMO_MODEL_NAME = "baton-demo"


def demo_model_path() -> Path:
    """The directory with the demo model's config, weights, tokenizer and chat template."""
    return Path(__file__).resolve().parent / "weights"
