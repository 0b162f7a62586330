"""Who may use the router, over what, and how much. docs/security.md is the operator's page."""
