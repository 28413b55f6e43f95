"""Storage tiers as async actors; `files` has the common parts of disk tiers.

Tiers do not depend on each other, or on jobs: the actor owns queues, deadlines and results.
"""
