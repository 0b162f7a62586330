"""`baton top`: a cluster and its requests, live in a terminal."""
