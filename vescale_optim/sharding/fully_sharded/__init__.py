"""ZeRO-3: what `vescale_optim.sharding.fully_shard` is made of.

    layout       how the parameters of a module are cut: whole units, or rows, by a written cost model
    slots        where parameters are registered in modules, sharded or whole
    group        parameters that travel together: their shards, their global buffer, their gradients
    memory       the global buffers' memory: lent, given back, reused; how much may be out at a time
    schedule     what the modules under one root share: order, prefetching, reductions under way, the end of backward
    module_state the hooks of one wrapped module
    state_dict   saving shards, loading anything
    tensors      tensors inside the arguments and results of modules
"""
