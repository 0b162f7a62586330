"""Benchmarks of the router's policies on simulated clusters; the simulator itself is planning.simulator."""
