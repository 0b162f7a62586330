"""What bodies of requests have in common, whichever front they come through."""
