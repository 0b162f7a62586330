"""Constrained output: a request's constraint becomes a grammar over the model's tokens.

1. The scheduler asks for a request's grammar (`GrammarCompiler.ask`). A compiled one is in the cache; else the request
   waits in WAITING_FOR_GRAMMAR, in no queue, while a thread compiles.
2. The thread has it compiled in a process with limits on time and memory first, as the libraries have none of their
   own and a thread cannot be killed. What passes is compiled again here, where it is needed, with the GIL released.
3. The worker has a matcher for each request that runs. It follows the output, also that of other pods and of before a
   preemption, and fills a bit mask of the tokens that may come next, which is applied on the device.
"""
