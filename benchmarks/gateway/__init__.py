"""What each API of the gateway costs the router, next to an older checkout."""
