"""Executors run the model: in this process, or in several."""
