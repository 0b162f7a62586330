"""The HTTP front: OpenAI's completions and chat completions, models, health, metrics."""
