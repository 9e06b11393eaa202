"""What a Python interpreter is made of on disk: what a pod must show for it to run there at its own absolute path.

A venv of a venv, an editable install and a Python in a 0700 home all come down to a list of directories; asking the
interpreter itself (isolated, once) is the only answer that is right for all of them.
"""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass

from firepool_wire.errors import BadRequest

_ASK = (
    "import json,sys,pickle;print(json.dumps({'prefixes':[sys.prefix,sys.base_prefix,sys.exec_prefix,sys.base_exec_prefix],"
    "'path':sys.path,'executable':sys.executable,'version':'%d.%d'%sys.version_info[:2],'pickle':pickle.HIGHEST_PROTOCOL}))"
)


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python as a pod needs it."""

    executable: str
    #: `major.minor`.
    version: str
    #: Highest pickle format.
    pickle: int
    #: Directories to show, outermost only, absolute.
    roots: tuple[str, ...]


def outermost(paths: list[str]) -> tuple[str, ...]:
    """Existing directories of `paths`, under their own and their real names, without those that lie below another one."""
    given = [p for p in paths if p and os.path.isabs(p) and os.path.isdir(p)]
    real = sorted({*(os.path.normpath(p) for p in given), *(os.path.realpath(p) for p in given)})
    kept: list[str] = []
    for path in real:
        if path != "/" and not any(path.startswith(f"{k}/") for k in kept):
            kept.append(path)
    return tuple(kept)


def own() -> Interpreter:
    """The interpreter that runs this code."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
    roots = _with_links(sys.executable, [*prefixes, *(p for p in sys.path if os.path.isdir(p)), package])
    return Interpreter(sys.executable, f"{sys.version_info[0]}.{sys.version_info[1]}", pickle.HIGHEST_PROTOCOL, roots)


def ask(python: str, timeout_s: float = 20.0) -> Interpreter:
    """Ask `python` about itself. Raises: BadRequest: it does not exist or does not run."""
    try:
        done = subprocess.run([python, "-I", "-c", _ASK], capture_output=True, timeout=timeout_s, check=True, text=True)
        seen = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as e:
        said = getattr(e, "stderr", "") or str(e)
        raise BadRequest(
            f"the job interpreter {python} does not run: {said.strip()[-300:]}", field="settings.python"
        ) from e
    roots = _with_links(python, [*seen["prefixes"], *seen["path"]])
    return Interpreter(python, seen["version"], seen["pickle"], roots)


def _with_links(executable: str, paths: list[str]) -> tuple[str, ...]:
    """Add the directories that the executable's chain of symbolic links leads through (python → python3 → elsewhere)."""
    steps = list(paths)
    here = executable
    for _ in range(16):
        steps.append(os.path.dirname(here))
        if not os.path.islink(here):
            break
        here = os.path.normpath(os.path.join(os.path.dirname(here), os.readlink(here)))
    return outermost(steps)
