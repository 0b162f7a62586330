"""Everything that moves KV into and out of an engine.

    step loop            TransferPort  --messages-->  TransferActor (a thread)  --jobs-->  connector
                                       <---notes----      runs a Mover          <-results--
    whoever receives commands  ------client's news-->           |
    client                     <-------KVSaved------------------'

The scheduler knows the port as KVTransfers and nothing else of this package.
"""
