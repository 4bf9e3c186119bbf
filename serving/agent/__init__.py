"""The agent: keeps every replica of every model as fresh as what is published.

    published (a directory)  --\
    observed (each replica)  ---+-> rollout.next_action -> one call -> observed anew
    clock                    --/

`rollout` decides and touches nothing; `replica` makes the calls; `fleet` runs a thread for each replica, so
that one that hangs holds back nobody. `canary` decides which replica goes first and whether the others may
follow, by the answers to `golden` requests; `canary_keeper` does it. All state that matters lies in the
replicas and in the directory: an agent may be killed and started again at any time, and two of them do no
harm.
"""
