"""HTTP as all layers see it: an exchange, how errors are written, a line in the log for each request."""
