"""Where the model runs: in this process, or (later) in several."""
