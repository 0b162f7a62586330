"""Who is served now, who waits, and who is refused at once.

1. A request arrives. It is predicted when it would have its tokens; if that breaks a limit that it names, or there is
   neither room on the pods nor a place in the queue, it is refused at once and told when to come back.
                                                                                      room, forecast, limits, admission
2. While the cluster has room and no other waits, it is dispatched at once.                       gate
3. Else it waits. Strict priorities; within one, tenants share by weight; within a tenant, in order.    fairness.queue
4. Pods report, answers end: there is room, and the next one is dispatched.                       gate
5. Nothing that waits is dropped: it leaves by being served, by its client, or by its deadline.

Everything but `gate` is pure: time comes in as an argument.
"""
