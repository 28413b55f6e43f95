"""Inspection and clean-up of namespaces, also while tiers are open; see `FsMaintenance`.

Not needed by an open tier.
"""
