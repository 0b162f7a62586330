"""How the rest of a pod talks to its engine."""
