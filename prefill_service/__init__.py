"""The prefill-only pod."""
