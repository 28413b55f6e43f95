"""`kvoffload bench`: what tiers cost on this machine, beside what the machine itself can do."""
