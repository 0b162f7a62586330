"""The NIXL connector: a producer writes finished blocks straight into the blocks that a consumer has reserved.

`connector` combines the other modules: `agent` owns a NIXL agent, `sender` the transfers to peers, `address` the
address that one pod gives another, `digests` the check of what arrived, `jobs` the unsettled jobs.
"""
