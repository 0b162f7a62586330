"""Endpoints for operators, and for clients about their own requests."""
