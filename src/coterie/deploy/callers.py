"""The callers of the proxy: which of them are known devices, and how much each may use."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric import ec

from coterie.core.strangers import Strangers

Keys = Mapping[bytes, ec.EllipticCurvePublicKey]  # by their PEM, as devices show them
# Devices behind one address, if there are no keys to tell them apart.
_OF_AN_ADDRESS = 16


@dataclass(frozen=True)
class Limits:
    """The limits of connections to the proxy. Times are in seconds, sizes in bytes. Strangers are
    callers without a known key.
    """

    strangers: int = 256  # connections in all; a further one replaces the oldest
    of_an_address: int = 64  # such connections from one address
    of_a_device: int = 16  # connections with the same key
    at_once: int = 8  # simultaneous requests of strangers that are passed on
    handshake: float = 10.0  # of TLS
    request: float = 10.0  # for a request of a stranger, and again for its next one
    idle: float = 120.0  # without a byte until a device's connection is closed
    slowest: int = 1 << 14  # bytes per second of a device's body, after the first `idle` seconds
    header: int = 1 << 14  # of a request
    strange_body: int = 1 << 12  # of a stranger
    # of a device; Flower cuts arrays into parts of 5 MiB, but not those of secure aggregation
    body: int = 256 << 20
    large: int = 8 << 20  # a device sends larger bodies one at a time
    # further bytes of a refused caller are discarded, so that the refusal reaches it
    linger: float = 1.0
    wait: float = 20.0  # for a message that a device requests; devices give up after 30


class Rejected(Exception):
    """A request that is not passed on."""

    def __init__(self, status: int, reason: str) -> None:
        self.status, self.reason = status, reason
        super().__init__(reason)


@dataclass
class _Device:
    """The open connections of one device."""

    connections: int = 0
    large: asyncio.Lock = field(default_factory=asyncio.Lock)


class Callers:
    """The open connections of devices and of unknown callers, within the limits. `keys` returns the
    keys of the devices known now; None: every caller counts as a device.
    """

    def __init__(self, limits: Limits, keys: Callable[[], Keys | None]) -> None:
        self.limits, self.keys = limits, keys
        self.strangers = Strangers[asyncio.Task[None]](
            limits.of_an_address, lambda task: task.cancel()
        )
        self.strangers_at_once = asyncio.Semaphore(limits.at_once)
        self._devices: dict[bytes, _Device] = {}

    def device(self, key: bytes) -> _Device:
        """Return the open connections of the device with this key."""
        return self._devices.setdefault(key, _Device())

    def enter(self, key: bytes) -> None:
        """Count the current connection for a device. Raises Rejected if the device has too many."""
        device, task = self.device(key), asyncio.current_task()
        if device.connections >= self.limits.of_a_device * (
            _OF_AN_ADDRESS if self.keys() is None else 1
        ):
            raise Rejected(429, "Too many connections of this device")
        device.connections += 1
        if task is not None:
            self.strangers.leave(task)

    def leave(self, key: bytes) -> None:
        """Undo `enter`."""
        device = self.device(key)
        device.connections -= 1
        if not device.connections:
            del self._devices[key]
