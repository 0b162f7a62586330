"""The parts of an answer's text: reasoning, text and tool calls."""
