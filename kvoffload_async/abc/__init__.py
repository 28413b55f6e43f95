"""Contracts that the author of an extension implements: tiers, policies, transports.

No implementations, and nothing that only this package calls.
"""
