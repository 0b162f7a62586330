"""Speculative decoding: what proposes drafts of the next tokens. Which of them are right is seen by the tokens that the
model samples anyway, so that they change nothing but time."""
