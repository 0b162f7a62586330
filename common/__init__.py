"""Code that the pods and the router share."""

__version__ = "0.2.0"
