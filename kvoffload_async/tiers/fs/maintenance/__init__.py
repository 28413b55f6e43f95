"""Looking after namespaces, while tiers are open on them too: see `FsMaintenance`.

Nothing that an open tier needs.
"""
