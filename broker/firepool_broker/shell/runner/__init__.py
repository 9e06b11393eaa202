"""The runner: joins the engine with the ports. One room a concern:

`runner` the door and the public API; `effects` who carries what out; `intake` submissions, keys, dependencies; `saves`
store writes; `calls` one-call effects on agents; `deliver` what a launch needs; `follow` launches and event logs;
`harvest` what an attempt leaves; `stream` results as they come; `pods` providers and strikes; `marks` annotations;
`start` the facts of a start; `answers` submitters and watchers; `watch` subscriptions; `wake` timers; `clock`; `words`
failures and errors; `desk` the shared tables.
"""

from firepool_broker.shell.runner.desk import Accepted, Parts
from firepool_broker.shell.runner.runner import Runner
from firepool_broker.shell.runner.watch import Change, Subscription

__all__ = ["Accepted", "Change", "Parts", "Runner", "Subscription"]
