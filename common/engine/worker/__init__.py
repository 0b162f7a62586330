"""One worker: a loaded model, its KV cache and its connector."""
