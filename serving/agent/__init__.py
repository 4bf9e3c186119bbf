r"""The agent: it keeps every replica of every model as fresh as the published model.

    published (a directory)  --\
    observed (each replica)  ---+-> rollout.next_action -> one call -> observed again
    clock                    --/

`rollout` decides and has no side effects; `replica` makes the calls; `fleet` runs a thread for each replica,
so that a replica that hangs delays no other. `canary` decides which replica goes first, and from its
responses to golden requests whether the others follow; `canary_keeper` carries that out. All lasting state is
in the replicas and in the directory: an agent may be killed and restarted at any time, and two agents do no
harm.
"""
