"""What the load generator of `baton bench` itself costs, and whether its figures are those of another."""
