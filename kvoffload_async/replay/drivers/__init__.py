"""What drives an engine through requests: a scheduler step by step, or tasks on an event loop."""
