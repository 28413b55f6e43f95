"""Moving bytes between device and host."""
