"""How little prompts disturb streams; see `python -m benchmarks.handoff --help`."""
