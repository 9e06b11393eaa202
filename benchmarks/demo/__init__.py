"""`make demo`: RL and agent loops whose every rollout really runs a candidate program against its test in an isolated job, in
three arms: Reuse On, Reuse Off, Fresh pod per job (spec §13).

Rooms: `bodies` (what runs in the pods), `venue` (the broker and its pools), `loops` (the programs that submit), `show` (what a
person sees). The pod start is simulated, and said to be wherever it shows.
"""
