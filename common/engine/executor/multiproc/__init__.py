"""The executor of several ranks, each a process of its own."""
