"""Contracts that the author of an extension implements: tiers, policies, transports."""
