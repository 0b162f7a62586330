"""The public gRPC API: baton.v1.Inference and baton.v1.Admin."""
