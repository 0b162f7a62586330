"""gRPC as Baton uses it: channels, servers, error mapping, conversion between messages and values."""
