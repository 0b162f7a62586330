"""Planning of clusters: a profile of the engine, the simulator with the router's own policies, and the search for the
fewest pods that keep the SLOs."""
