"""What keeps a request alive when pods die: attempts, the line of migrations, moving away from draining pods."""
