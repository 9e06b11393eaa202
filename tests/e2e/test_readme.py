"""Everything that the README shows is run, as a newcomer would."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The README's code blocks of a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def environment(home: Path) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("FIREPOOL_")}
    return env | {"FIREPOOL_HOME": str(home), "NO_COLOR": "1", "PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}


def test_the_readmes_python_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks("python")))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment(tmp_path / "home"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["1.0", "[1.0, 0.0, 1.0]"], done.stdout
    verdicts = [line.split() for line in lines[2:6]]
    assert [v[0] for v in verdicts] == ["True", "False", "False", "False"]
    assert verdicts[1][1] == "RunTimeout"
    assert all(v[2] == "False" for v in verdicts), f"a program's own failure must not be masked: {lines}"
    assert lines[6] == "[1.0, 0.0, 1.0]"


def test_the_readmes_command_lines_run(tmp_path: Path) -> None:
    commands = [
        line[2:].split("#")[0].strip()
        for block in blocks("console")
        for line in block.splitlines()
        if line.startswith("$ firepool")
    ]
    assert commands[0].startswith("firepool up")
    assert commands[-1] == "firepool down"
    try:
        for command in commands:
            done = subprocess.run(
                shlex.split(command),
                cwd=tmp_path,
                env=environment(tmp_path / "home"),
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
            if "print" in command:
                assert "hello" in done.stdout
    finally:
        subprocess.run(
            ["firepool", "down"],
            cwd=tmp_path,
            env=environment(tmp_path / "home"),
            capture_output=True,
            timeout=60,
            check=False,
        )


def test_the_make_targets_that_the_readme_names_exist() -> None:
    makefile = (Path(__file__).resolve().parents[2] / "Makefile").read_text()
    for target in re.findall(r"\bmake (\w+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
