"""Choosing the next token from logits: reproducibly, vectorised over the batch, doing only what some request needs."""
