"""The models that are served: their pods, tokenizers and queues, and what the fronts call."""
