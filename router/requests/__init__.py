"""What clients ask for: in one form for all fronts, validated, tokenised."""
