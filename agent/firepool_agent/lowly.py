"""Run a command without any privilege: `python -m firepool_agent.lowly UID COMMAND…`. Source builds execute foreign code, so
they start through here; UID 0 keeps the caller's uid and drops everything else. Standard input is closed.
"""

import os
import sys

from firepool_agent import seccomp, syscalls


def main() -> int:
    """Drop, then become the command."""
    uid, command = int(sys.argv[1]), sys.argv[2:]
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    syscalls.no_new_privileges()
    profile = seccomp.default_profile(deny_tracing=True)
    if profile is not None:
        syscalls.set_seccomp_filter(profile)
    os.execvp(command[0], command)


if __name__ == "__main__":
    raise SystemExit(main())
