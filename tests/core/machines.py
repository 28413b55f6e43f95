"""How the state machines run: as many examples as the profile says."""

from hypothesis import Phase, settings

# Explaining a failure retraces every line of every attempt: minutes, and a test that times out.
AS_THE_PROFILE = settings(
    phases=[phase for phase in settings().phases if phase is not Phase.explain],
)
