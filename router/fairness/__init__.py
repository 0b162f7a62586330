"""Fair shares for tenants: of the queue, of threads, of turns on the event loop."""
