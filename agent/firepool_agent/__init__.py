"""The in-pod agent: a small server next to untrusted code, whose only client is the broker.

Standard library only. One half serves calls and runs attempts (`server routes h1`, `attempts running verdict`, `zygote cell calls items
order` in the job interpreter, `env logs outputs usage stacks journal eventlog blobs inputs`); the other makes the pod real
and gives it back clean. The doors between the halves:

    nursery   forks, builds the pod around the child, calls `server.serve(config: PodConfig) -> int` there (no exec)
    scratch   Scratch(config).fresh(uid) -> Slot(number, uid, root, work, home, tmp, shm)    empty, owned by uid
    isolate   Uids(config).next() -> int                                  a fresh uid per attempt (0: none of our own)
              fork_attempt(config, slot, status_w) -> Child | None        in the single-threaded zygote: Child(pid of the guard);
                                                                          None in the attempt's own process, still privileged
              read_end(data) -> End | None                                what the guard wrote to `status_w`: End(status, peak_rss_bytes,
                                                                          cpu_s, leftovers); None: the guard itself was killed
              enter_attempt(config, slot, Exposure(package, layers))      in the attempt's process, right before user code
    cgroups   JobGroup(config): join, limit, reset_peak, peak_bytes, current_bytes, oom_kills, kill
    janitor   Janitor.start(config)                                       helper process (kill sweep, shredding); fork it at boot
    reset     Resetter(config, janitor, scratch): baseline(), run(slot, guard, wait_s) -> ResetReport, await settled()
    unpack    Unpacker(config).tree(digest, zip) -> str                   cached, read-only; PackageError
    layers    await Layers(config, janitor).ensure(requirements, settings, loaded) -> Layer      DependencyInstallError
    gpu       cards(config), used_bytes(config, pids)

Behind the nursery: `estate` (what its pods share of the machine), `birth` (the forks), `furnish` and `rootfs` (the pod around the
child), `network netlink masquerade` (its address and way out), `cgroups interpreter levels gpu line`. Below everything, calling
nothing of ours: `syscalls procfs sockets seccomp`.

SIGTERM to the guard reaches the attempt's process; SIGKILL to it ends the attempt's whole PID namespace.
"""
