"""Tool calls in the text of an answer: a parser for each family of models."""
