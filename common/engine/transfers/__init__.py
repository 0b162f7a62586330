"""Everything that moves KV into and out of an engine.

    step loop            TransferPort  --messages-->  TransferActor (a thread)  --jobs-->  connector
                                       <---events----      runs a Mover          <-results--
    receivers of commands      --client's updates-->           |
    client                     <-------KVSaved------------------'

The scheduler knows the port as KVTransfers and nothing else of this package.
"""
