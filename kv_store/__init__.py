"""Connectors: how KV blocks get from one engine to another. `kv_store.registry` names them."""
