"""Paged attention behind one small interface, and its hook into transformers' modelling code."""
