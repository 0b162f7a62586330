"""Speed of the KV plane next to its bare media: `python -m benchmarks.kv --help`."""
