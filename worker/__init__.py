"""The gradient side: joins a parameter server, computes the shards it is given, keeps nothing of its own.

machine    pure decisions: joining, computing, waiting, leaving
batches    which samples a shard of a step holds
compute    JAX: weights and a batch -> summed gradient leaves
client     the edge: the same loop as the server's, seen from the other side
"""
