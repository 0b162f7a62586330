"""Profiles of a running engine: traces of its step loop by torch's profiler.

1. A client sends StartProfile. The profiler starts on the step loop's thread, the only one that it records, and marks
   steps and their phases in the trace.
2. Every few steps it is stopped and started again: such a window is small, so that stopping, which torch does with the
   interpreter lock held, stalls the loop for some ten milliseconds only, and memory stays bounded.
3. A thread of its own writes windows to one compressed file, in a directory that the client has made.
4. After the seconds, the steps or the events asked for, or at an EndProfile, the loop goes on without a profiler. The
   thread completes the file, and answers with a CallResult. The client reads the file and removes it.
"""

TRACE_FILE = "trace.json.gz"  # in the directory of the client
