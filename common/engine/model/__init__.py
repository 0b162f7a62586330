"""Models from transformers: loading, what they cache, and what identifies them."""
