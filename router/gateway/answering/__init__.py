"""What answers of several fronts have in common: choices, beams, formats, streams that clients resume."""
