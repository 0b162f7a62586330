"""Shared parts of the fronts' answers: choices, beams, formats, streams that clients resume."""
