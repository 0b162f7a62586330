"""The scheduler-plus-worker core of every pod.

client  <- ZeroMQ + msgspec ->  EngineCoreProc: input thread | busy loop | output thread
EngineCore.step() = scheduler.schedule() -> executor.execute(SchedulerOutput) -> scheduler.update(ModelRunnerOutput)
"""
