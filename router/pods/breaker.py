"""Outlier ejection: the circuit breaker of one pod. Pure, by a clock that is given.

    closed --trip--> open --its time has passed--> half open --a probe--> closed, or open

Each ejection is twice as long as the one before. A pod that has been well for `eject_max_s` is forgiven one.
"""

from __future__ import annotations

from collections.abc import Callable

from router.health_config import HealthConfig

_MAX_LEVEL = 32


class Breaker:
    """Says for how long to eject. When to, its owner decides."""

    def __init__(self, config: HealthConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._level = 0.0  # ejections that are not forgiven yet
        self._closed_since = clock()
        self._open_until: float | None = None  # None: closed

    @property
    def is_closed(self) -> bool:
        """The pod may be used."""
        return self._open_until is None

    @property
    def remaining_s(self) -> float:
        """Seconds until the pod is probed; 0: closed, or half open."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - self._clock())

    def trip(self) -> None:
        """Eject; again, if the probe failed."""
        now, config = self._clock(), self._config
        if self.is_closed:
            self._level = max(0.0, self._level - (now - self._closed_since) / config.eject_max_s)
        self._open_until = now + min(config.eject_max_s, config.eject_base_s * 2.0 ** int(self._level))
        self._level = min(self._level + 1, _MAX_LEVEL)

    def probe_now(self) -> None:
        """It was started anew: whatever was wrong may be over."""
        if self._open_until is not None:
            self._open_until = self._clock()

    def close(self) -> None:
        """The probe went well."""
        self._open_until = None
        self._closed_since = self._clock()
