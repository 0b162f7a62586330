"""The parts that all benchmarks share: processes, checkouts, models, options of commands and pages of results."""
