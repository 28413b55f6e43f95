"""Monitoring of a running engine: metrics, status, spans and trace events."""
