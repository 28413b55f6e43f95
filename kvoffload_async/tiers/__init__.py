"""Storage tiers as async actors; `files` is what those on disk share.

No tier knows another, and none its jobs: queues, deadlines and results are the actor's.
"""
