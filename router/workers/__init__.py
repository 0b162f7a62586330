"""Several router processes behind one HTTP port and one gRPC port.

1. The parent reserves both ports, makes the memory in which quotas are counted, and starts the workers.  supervisor
2. Each worker is a router of its own, with its own connections to pods, prefix index and queue. It listens on the same
   ports; the kernel gives each connection to one of them (SO_REUSEPORT).                               worker, ports
3. A socket joins each worker with the parent. What a client asks about the router as a whole goes from the worker that
   it reached, by way of the parent, to the others.                                                     link, peers
4. A worker that dies is started again. What it had counted stays in the sums of /metrics.              metrics
5. SIGTERM reaches the parent, which has all workers drain. A worker whose parent is gone ends at once.
"""
