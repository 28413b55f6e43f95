"""How the state machines run."""

from hypothesis import Phase, settings

# Explaining a failure retraces every line of every attempt: minutes, and a test that times out.
THOROUGH = settings(
    max_examples=max(250, settings().max_examples),
    phases=[phase for phase in settings().phases if phase is not Phase.explain],
)
