"""Calls to the agents inside pods: a small HTTP/1.1 client and, on it, the `AgentClient` port.

The broker dials, agents never do (`design.md` §2). What an answer means for a pod or a job is decided elsewhere; here
the only judgement is whether a call was answered, refused by nobody listening, or left unknown.
"""

from firepool_broker.shell.agents.client import Agents

__all__ = ["Agents"]
