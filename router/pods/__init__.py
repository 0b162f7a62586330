"""The pods that the router sends work to: connections, health, load, and whether they fit together."""
