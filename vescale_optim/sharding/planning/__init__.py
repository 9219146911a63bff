"""How `plan_buffer` finds its answer: pure Python on sizes and blocks, no torch.

    arrange              what lies where: by blocks alone, by whole tensors, or with uneven shards
    partition            segments of least padding, by several searches
    parts                one segment: the smallest S for any choice of tensors
    packing              one order of tensors in one segment
    best_order           all orders
    segment_partitions   few tensors: which share a segment
    shard_sizes          many tensors: which S_1, S_2, ... can hold all classes of blocks
    balance              whole tensors to ranks, by cost and size
    fill                 small tensors into the room that is left
    bounds               what no plan can beat

Imports point one way: arrange to partition, balance and fill; partition to parts, bounds and the two searches; all to
packing.
"""
