"""A worker before a device whose compute stream is under the test's control."""

from transport.watched import WatchedTransport
from transport.worlds import FLAT, STORE, Device, Wanted

from kvoffload_async.abc.transport import Transfer, Transport
from kvoffload_async.facade.connector.protocol import OffloadingConnectorMetadata, TransferJobSpec
from kvoffload_async.facade.connector.worker import OffloadingConnectorWorker
from kvoffload_async.types import CPULoadStoreSpec, GPULoadStoreSpec, as_block_ids


def job(blocks, slots, req_id="r"):
    device = GPULoadStoreSpec(as_block_ids(blocks), (len(blocks),), (0,))
    return TransferJobSpec(device, CPULoadStoreSpec(as_block_ids(slots)), req_id)


def meta(loads=None, stores=None, flush=()):
    return OffloadingConnectorMetadata(loads or {}, stores or {}, frozenset(flush))


class Computing:
    """A device whose compute stream is under the test's control, and a worker before it."""

    def __init__(self, **options):
        self.device = Device(FLAT)
        self.transport = self.device.transport(WatchedTransport)
        self.events = []
        self.is_computing = False
        self._unfinished = []
        self._record_idle = self.transport.record_compute
        self.transport.record_compute = self.record
        self.worker = OffloadingConnectorWorker(self.transport, **options)

    def record(self):
        if self.is_computing:
            self._unfinished.append(self.device.computing())
            event = self._unfinished[-1].event
        else:
            event = self._record_idle()
        self.events.append(event)
        return event

    def finish(self):
        self.is_computing = False
        for computing in self._unfinished:
            computing.reach()

    def expect(self, direction, blocks, slots):
        self.device.apply(direction, [Wanted(tuple(blocks), 0, tuple(slots))])


def ended(results):
    return {result.job_id: result.success for result in results}


class Broken(Transport):
    """Fails in every way a transport must not."""

    class Lost(Transfer):
        async def outcome(self):
            raise KeyError("lost")

        def synchronize(self, timeout_s):
            return True

    def record_compute(self):
        return object()

    def submit(self, copies, after):
        if copies.direction is STORE:
            raise ValueError("no")
        return self.Lost()

    def close(self, timeout_s):
        return True
