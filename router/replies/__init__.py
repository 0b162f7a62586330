"""What the text of an answer consists of: reasoning, text and tool calls."""
