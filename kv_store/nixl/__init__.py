"""The NIXL connector: a producer writes finished blocks straight into the blocks that a consumer has reserved.

`connector` ties together what each of the other modules owns: `agent` a NIXL agent, `sender` the transfers to peers,
`address` what one pod tells another to be written to, `digests` the proof of what arrived, `jobs` what is unsettled.
"""
