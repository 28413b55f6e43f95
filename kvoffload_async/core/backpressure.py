"""Back-pressure: drops a share of the stores to a slow tier.

The store latency, in seconds per MiB, is averaged exponentially. Above the high-water mark, a
growing share of the stores is dropped. While stores are dropped, the average decays between
completions, so that the tier recovers even with few stores. Promotions are unaffected.

Source: the constants are those of vLLM 0.33's detector (pull request 50045).
"""

from __future__ import annotations

from dataclasses import dataclass

_ALPHA = 0.15
_SEED_SAMPLES = 10
_HALF_LIFE_S = 2.0
_RECOVERY_S = 1.0
_FAILURES_IN_A_ROW = 3
_FAILURE_FACTOR = 4.0
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class BackpressureSettings:
    """Thresholds of the average store latency, with hysteresis.

    Attributes:
        high_water_s_per_mib: Stores are dropped above this latency.
        low_water_s_per_mib: Dropping ends below this latency.
    """

    high_water_s_per_mib: float
    low_water_s_per_mib: float


LOCAL_BACKPRESSURE = BackpressureSettings(0.010, 0.002)
NETWORK_BACKPRESSURE = BackpressureSettings(0.050, 0.010)


class Backpressure:
    """Decides which stores to drop for a slow tier.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        is_pressed: Whether stores are being dropped.
    """

    def __init__(self, settings: BackpressureSettings) -> None:
        self._settings = settings
        self.clear()

    def clear(self) -> None:
        """Reset to the initial state."""
        self._ema = 0.0
        self._samples = 0
        self._failures = 0
        self.is_pressed = False
        self._credit = 0.0
        self._recovering_until_s: float | None = None
        self._updated_s: float | None = None

    def store_ended(self, seconds: float, num_bytes: int, now_s: float) -> None:
        """Update the latency average with a completed store.

        The first samples have equal weights; later ones are averaged exponentially.
        """
        self._failures = 0
        if num_bytes <= 0:
            return
        sample = seconds * _MIB / num_bytes
        self._samples += 1
        weight = 1 / self._samples if self._samples <= _SEED_SAMPLES else _ALPHA
        self._set(self._ema + weight * (sample - self._ema), now_s)

    def store_failed(self, now_s: float) -> None:
        """Record a failed store; several consecutive failures count as a high latency."""
        self._failures += 1
        if self._failures >= _FAILURES_IN_A_ROW:
            self._set(_FAILURE_FACTOR * self._settings.high_water_s_per_mib, now_s)

    def drops_store(self, now_s: float) -> bool:
        """Return whether to drop the next store."""
        self._decay(now_s)
        share = self._share(now_s)
        self._credit += share
        if self._credit < 1:
            return False
        self._credit -= 1
        return True

    def _share(self, now_s: float) -> float:
        if self.is_pressed:
            high = self._settings.high_water_s_per_mib
            return min(1.0, max(0.0, (self._ema - high) / high / 2))
        if self._recovering_until_s is not None and now_s < self._recovering_until_s:
            return 0.5
        return 0.0

    def _decay(self, now_s: float) -> None:
        if self.is_pressed and self._updated_s is not None and now_s > self._updated_s:
            self._set(self._ema * 0.5 ** ((now_s - self._updated_s) / _HALF_LIFE_S), now_s)

    def _set(self, ema: float, now_s: float) -> None:
        self._ema = ema
        self._updated_s = now_s
        known = self._samples >= _SEED_SAMPLES or self._failures >= _FAILURES_IN_A_ROW
        if not known and not self.is_pressed:
            return
        if ema > self._settings.high_water_s_per_mib:
            self.is_pressed = True
        elif self.is_pressed and ema < self._settings.low_water_s_per_mib:
            self.is_pressed = False
            self._credit = 0.0
            self._recovering_until_s = now_s + _RECOVERY_S
