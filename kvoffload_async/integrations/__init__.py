"""Integrations with other software; each imports one optional dependency.

Code that is useful without that dependency belongs elsewhere.
"""
