"""What a model costs on many ranks, before there is any: the arithmetic behind `python -m vescale_optim plan`.

    model_shapes     names and shapes of a model, from a file or from code, on the meta device
    declared         what an optimizer declares about them: blocks, FLOPs, state
    storages         buckets and owners, for replicated and for sharded parameters
    report           bytes, FLOPs and padding of such a plan; the sweep over numbers of ranks
    rank_bytes       memory and traffic of a rank
    peers            padding of other planners that keep the same blocks whole
    tables, pictures how a report is shown

No process group and no device anywhere; the optimizers' own code declares and the planner's own code plans.
"""
