"""OpenAI's API: completions, chats, the tokenizer. Other fronts turn their requests into its chats."""
