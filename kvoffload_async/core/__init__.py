"""Sans-IO: plain synchronous state machines; events in, effects out; no clock, thread or torch."""
