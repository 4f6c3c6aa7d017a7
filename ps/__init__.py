"""The parameter server (PS): the one place where weights change.

membership, plan, rounds, machine   pure decisions: who is here, who computes what, when a step closes
reduce, update, optimizers          sums over the shard tree; mean gradient -> optax -> new weights
checkpoint                          a version on disk, whole or not at all
server                              the edge: poll, decode, ask the machine, carry out its actions
settings                            the `train`, `optimizer`, `sync` and `checkpoint` sections of config.yaml
"""
