"""The scheduler-plus-worker core of every pod.

client  <- ZeroMQ + msgspec ->  EngineCoreProc: input thread | busy loop | output thread
EngineCore.step() = scheduler.schedule() -> executor.execute(SchedulerOutput) -> scheduler.update(ModelRunnerOutput)
"""

import os
import time

IMPORTED_AT = time.time()  # seconds since 1970

# What torch computes on several threads in OpenMP's: while these wait for more, they sleep, as spinning they would take
# the cores from the threads of kernels and from other processes. Read when torch is imported, which is below this.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
