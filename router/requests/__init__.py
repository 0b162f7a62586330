"""Requests of clients: in one form for all fronts, validated, tokenised."""
