"""The course of recent requests, and where their time went."""
