"""A discrete-event simulation of clusters of pods, driven by the router's own policies and prefix index."""
