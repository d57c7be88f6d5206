"""A target over several processes, one per device: tensor parallelism by transformers' own plan.

Rank 0 is the process that serves. It owns the session table, samples, and keeps the context features; the
other ranks are worker processes that it starts and that repeat what it does to its share of the model:

    rank 0   session table, features, sampling ─┐ all-reduce, all-gather (torch.distributed: gloo or nccl)
    rank 1   heads and KV heads of its share  ──┤
    rank …                                    ──┘
       ▲ commands over a socket pair: load, make the pool, forward, move
"""
