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
    """The limits of connections to the proxy.

    Args:
        strangers: Connections without a known key, in all. A further one replaces the oldest.
        of_an_address: Such connections from one address.
        of_a_device: Connections with the same key.
        at_once: Simultaneous requests of unknown callers that are passed on.
        handshake: Seconds for the TLS handshake.
        request: Seconds for a request of an unknown caller, and again for its next one.
        idle: Seconds without a byte until a device's connection is closed.
        slowest: Minimal bytes per second of a device's body, after the first `idle` seconds.
        header: Bytes of a request's header.
        strange_body: Bytes of an unknown caller's body.
        body: Bytes of a device's body. Flower cuts arrays into parts of 5 MiB; of secure
            aggregation it sends a whole reply at once.
        large: Bytes of a body above which a device sends one at a time.
        linger: Seconds for which further bytes of a refused caller are discarded, so that the
            refusal reaches it.
        wait: Seconds for which a device's request for messages waits for one. Devices give up
            after 30.
    """

    strangers: int = 256
    of_an_address: int = 64
    of_a_device: int = 16
    at_once: int = 8
    handshake: float = 10.0
    request: float = 10.0
    idle: float = 120.0
    slowest: int = 1 << 14
    header: int = 1 << 14
    strange_body: int = 1 << 12
    body: int = 256 << 20
    large: int = 8 << 20
    linger: float = 1.0
    wait: float = 20.0


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
    """The open connections of devices and of unknown callers, within the limits.

    Args:
        limits: The limits of connections and requests.
        keys: Returns the keys of the devices known now; None: every caller counts as a device.
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
        """Count the current connection for a device. Raises Rejected if the device has too
        many.
        """
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
