"""Where the model runs: in this process, or in several."""
