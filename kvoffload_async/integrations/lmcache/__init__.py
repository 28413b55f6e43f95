"""LMCache's own tiers, to measure beside this package's; nothing here is imported before that."""
