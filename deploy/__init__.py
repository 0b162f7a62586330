"""How Baton is run: the local cluster launcher here, container and cluster files beside it."""
