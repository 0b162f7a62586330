"""Constraints on the text of an answer.

client.generate(prompt, structured_outputs=Constraint.json_schema(schema))
"""

from __future__ import annotations

from common.types import Constraint

__all__ = ["Constraint"]
