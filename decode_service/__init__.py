"""The decode-only pod."""
