"""Requests from a file in OpenAI's batch format, answers to another."""
