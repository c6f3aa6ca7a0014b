"""Streamed updates whose work comes as late as it may, on CPUs: whoever reads without waiting sees what was there before."""

from bigtrain.optim.lanes import COMPUTE, DOWN, GATHER, UP, UPDATE
from bigtrain.optim.options import Offload
from bigtrain.optim.split import stream_state
from bigtrain.zero import flat


class Late:
    """Lanes whose work is put off until COMPUTE, or the program, waits for it, and then no more of it is done than that needs."""

    def __init__(self):
        self.queues = {lane: [] for lane in (UP, UPDATE, DOWN, GATHER)}
        self.lanes, self.reached, self.waits = {}, set(), 0

    def run(self, lane, work):
        self.queues[lane].append(("run", work))

    def mark(self, lane):
        mark = len(self.lanes)
        self.lanes[mark] = lane
        if lane == COMPUTE:
            self.reached.add(mark)
        else:
            self.queues[lane].append(("mark", mark))
        return mark

    def wait(self, lane, mark):
        if lane != COMPUTE:
            self.queues[lane].append(("wait", mark))
            return
        self.waits += 1
        self._reach(mark)

    def keep(self, tensor, lane):
        pass

    def finish(self):
        for lane, queue in self.queues.items():
            while queue:
                self._one(lane)

    def _reach(self, mark):
        while mark not in self.reached:
            self._one(self.lanes[mark])

    def _one(self, lane):
        kind, thing = self.queues[lane].pop(0)
        if kind == "run":
            thing()
        elif kind == "mark":
            self.reached.add(thing)
        else:
            self._reach(thing)


def stream_late(engine, late, gradients=0.0):
    """Stream an engine's optimizer state, and that share of its gradients, in small chunks through the lanes `late`."""
    ds, offload = engine.deepspeed, Offload(ratio=0.7, buffers=2, gradients=gradients)
    stream_state(ds, flat.partition_layouts(ds.optimizer), late, offload, chunk_bytes=20_000)
    engine._reduction.stream = ds.basic_optimizer.stream
