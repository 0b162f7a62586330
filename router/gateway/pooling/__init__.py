"""Embeddings, classifications, scores and rankings: what is computed of prompts instead of answers."""
