"""Shared parts of the bodies of requests, whichever front they come through."""
