"""One trace per request: where it begins, and the router's spans of it."""
