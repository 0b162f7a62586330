"""Clients that send many requests: the load generator of `baton bench`, and `baton run-batch`."""
