"""The fronts: HTTP and gRPC. One folder for each, and what they share."""
