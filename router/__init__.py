"""The front door and brain: HTTP gateway, public gRPC, tokenisation, routing and handoff orchestration."""
