"""Commands about jobs: submit, jobs, logs, cancel, explain."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from firepool_ray.cli.api import Api, target
from firepool_ray.cli.output import emit_json, job_exit_code, note, say, seconds, size, table
from firepool_wire.jobspec import Entrypoint, JobSpec, Requirements, sparse

Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of words.")]
JobId = Annotated[str, typer.Argument(help="The job's id, as `firepool jobs` shows it.")]

#: States that `--state` may name.
_STATES = ("PENDING", "QUEUED", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED")


def register(app: typer.Typer) -> None:
    """Add the commands of this room."""
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(submit)
    app.command("jobs")(list_jobs)
    app.command()(logs)
    app.command()(cancel)
    app.command()(explain)


def _pairs(values: list[str], option: str) -> dict[str, str]:
    pairs = {}
    for value in values:
        key, sign, rest = value.partition("=")
        if not sign or not key:
            raise typer.BadParameter(f"{value!r} is not KEY=VALUE", param_hint=option)
        pairs[key] = rest
    return pairs


def submit(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="What to run in the pod.")],
    sku: Annotated[str, typer.Option(help="Pool to run in.")] = "",
    pods: Annotated[int, typer.Option(help="Pods, all or none.", min=1)] = 1,
    queue: Annotated[str, typer.Option(help="Queue.")] = "default",
    priority: Annotated[int, typer.Option(help="Higher first.")] = 0,
    tag: Annotated[str, typer.Option("--lease-tag", help="Reuse tag: work that may share a pod.")] = "",
    env: Annotated[list[str], typer.Option("--env", "-e", metavar="KEY=VALUE", help="Variable of the job.")] = [],  # noqa: B006
    label: Annotated[list[str], typer.Option("--label", "-l", metavar="KEY=VALUE", help="Label.")] = [],  # noqa: B006
    working_dir: Annotated[
        Path | None, typer.Option(help="Folder to send along and run in (.gitignore is honoured).")
    ] = None,
    requirements: Annotated[
        Path | None, typer.Option("--requirements", "-r", help="Requirements file to install.")
    ] = None,
    outputs: Annotated[list[str], typer.Option(metavar="GLOB", help="Files to keep.")] = [],  # noqa: B006
    run_timeout_s: Annotated[float | None, typer.Option(help="Seconds the command may run.")] = None,
    queue_timeout_s: Annotated[float | None, typer.Option(help="Seconds it may wait.")] = None,
    max_retries: Annotated[int, typer.Option(help="Retries of a failed attempt.", min=0)] = 0,
    single_use: Annotated[bool, typer.Option(help="A pod of its own, deleted afterwards.")] = False,
    run: Annotated[str, typer.Option(help="Run name that groups jobs.")] = "",
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not follow the log; print the job's id.")] = False,
    as_json: Json = False,
) -> None:
    """Run a command in a warm pod. Follows its output and leaves with its exit code; Ctrl-C cancels it."""
    variables, labels = _pairs(env, "--env"), _pairs(label, "--label")
    with target(context).connect() as api:
        spec = JobSpec(
            entrypoint=Entrypoint(argv=tuple(command)),
            sku=api.sku(sku),
            pods=pods,
            queue=queue,
            priority=priority,
            lease_tag=tag or None,
            env=variables,
            labels=labels,
            package=api.upload_folder(working_dir) if working_dir else None,
            requirements=Requirements(text=requirements.read_text()) if requirements else None,
            outputs=tuple(outputs),
            run_timeout_s=run_timeout_s,
            queue_timeout_s=queue_timeout_s,
            max_retries=max_retries,
            single_use=single_use,
            run=run or None,
        )
        body = api.post("/v1/jobs", sparse(spec))
        job = str(body["id"])
        if no_wait:
            emit_json(body) if as_json else say(job)
            return
        try:
            if not as_json:
                note(f"[dim]job {job} on {spec.sku}[/dim]")
                _follow(api, job, 0)
            body = api.wait(job)
        except KeyboardInterrupt:
            api.post(f"/v1/jobs/{job}:cancel", {})
            note(f"job {job}: cancel requested (with --no-wait it runs on without this terminal)")
            raise
        if as_json:
            emit_json(body)
        else:
            _farewell(body)
        raise typer.Exit(job_exit_code(body))


def _follow(api: Api, job: str, offset: int) -> None:
    for chunk in api.stream(f"/v1/jobs/{job}/logs", follow="true", offset=str(offset)):
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()


def _farewell(body: dict[str, Any]) -> None:
    times = body.get("times") or {}
    first = times.get("submit_to_first_s")
    words = f"[dim]{body['state'].lower()} · path {body.get('path') or 'none'}"
    if first is not None:
        words += f" · first instruction after {seconds(first)}"
    if error := body.get("error"):
        words += f"[/dim]\n[red]{error['code']}[/red]: {error['message']}[dim]"
    note(words + "[/dim]")


def list_jobs(
    context: typer.Context,
    state: Annotated[list[str], typer.Option(help=f"Only these states: {', '.join(_STATES)}.")] = [],  # noqa: B006
    sku: Annotated[str, typer.Option(help="Only this pool.")] = "",
    queue: Annotated[str, typer.Option(help="Only this queue.")] = "",
    run: Annotated[str, typer.Option(help="Only this run.")] = "",
    limit: Annotated[int, typer.Option(help="At most so many, newest first.", min=1, max=1000)] = 20,
    as_json: Json = False,
) -> None:
    """List jobs, newest first."""
    query = {"sku": sku, "queue": queue, "run": run, "limit": str(limit), "state": ",".join(s.upper() for s in state)}
    with target(context).connect() as api:
        page = api.get("/v1/jobs", **{k: v for k, v in query.items() if v})
    if as_json:
        emit_json(page)
        return
    rows = []
    for body in page["jobs"]:
        times, error = body.get("times") or {}, body.get("error") or {}
        waiting = body.get("waiting") or {}
        what = error.get("code") or waiting.get("blocked_by") or ""
        rows.append(
            (
                body["id"],
                body["state"],
                body.get("name"),
                body["sku"],
                body.get("path"),
                seconds(times.get("submit_to_first_s")),
                what,
            )
        )
    table(
        ("JOB", "STATE", "NAME", "SKU", "PATH", "TO FIRST", "ERROR OR BLOCKER"),
        rows,
        empty="no jobs yet: firepool submit -- echo hello",
    )
    if page.get("cursor"):
        note("[dim]more: raise --limit[/dim]")


def logs(
    context: typer.Context,
    job: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the job's log ends.")] = False,
    offset: Annotated[int, typer.Option(help="Byte to start from.", min=0)] = 0,
) -> None:
    """Print a job's output."""
    with target(context).connect() as api:
        if follow:
            _follow(api, job, offset)
            return
        for chunk in api.stream(f"/v1/jobs/{job}/logs", offset=str(offset)):
            sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()


def cancel(
    context: typer.Context, jobs: Annotated[list[str], typer.Argument(help="Ids of the jobs.")], as_json: Json = False
) -> None:
    """Cancel jobs. A running one is CANCELLED once its processes are verified gone."""
    with target(context).connect() as api:
        bodies = [api.post(f"/v1/jobs/{job}:cancel", {}) for job in jobs]
    if as_json:
        emit_json(bodies)
        return
    for job in jobs:
        say(f"{job}: cancel requested")


def explain(context: typer.Context, job: JobId, as_json: Json = False) -> None:
    """Why a job waits, or how it got its pods: the path, why not a warmer one, what blocks it and who holds what."""
    with target(context).connect() as api:
        answer = api.get(f"/v1/jobs/{job}/explain")
        body = api.get(f"/v1/jobs/{job}")
    if as_json:
        emit_json(answer)
        return
    say(answer["text"])
    usage = body.get("usage") or {}
    if usage.get("peak_rss_bytes") is not None:
        say(f"[dim]peak memory {size(usage['peak_rss_bytes'])}, CPU {seconds(usage.get('cpu_s'))}[/dim]")
