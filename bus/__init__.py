"""How peers talk: messages, frames, the layout of leaves and buckets, and the transports. Knows no training and no JAX.

messages   the vocabulary, one Struct per message     codec      message <-> frames
tree       the fixed summation tree over shards       layout     parameter leaves -> aligned buckets
transport  what the loops know of a network           sockets    ZeroMQ (the only module that imports zmq)
memory     the same in one process, with faults       endpoints  addresses: who binds, who connects
settings   the `bus` section of config.yaml           errors     what can go wrong, as a tree
finite     what a gradient may hold
"""
