"""What the router costs: in front of pods that answer at once, next to sglang-router in front of trivial backends."""
