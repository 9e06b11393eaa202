"""Wheels and source archives made by the test itself, so that no index is needed."""

import base64
import hashlib
import io
import tarfile
import zipfile
from pathlib import Path


def wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """A pure wheel with these files."""
    info = f"{name}-{version}.dist-info"
    all_files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: firepool-tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    records = []
    for path, text in all_files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        records.append(f"{path},sha256={digest},{len(text.encode())}")
    all_files[f"{info}/RECORD"] = "\n".join([*records, f"{info}/RECORD,,"]) + "\n"
    target = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as z:
        for path, text in all_files.items():
            z.writestr(path, text)
    return target


_BACKEND = """
import base64, hashlib, os, zipfile

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    {action}
    name = "{name}-1.0-py3-none-any.whl"
    info = "{name}-1.0.dist-info"
    files = {{
        "{name}.py": "builder = %d\\n" % os.getuid(),
        info + "/METADATA": "Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0\\n",
        info + "/WHEEL": "Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }}
    files[info + "/RECORD"] = "".join("%s,,\\n" % f for f in [*files, info + "/RECORD"])
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w") as z:
        for path, text in files.items():
            z.writestr(path, text)
    return name
"""


def source(folder: Path, name: str, action: str = "pass") -> Path:
    """A source archive whose build runs `action` and needs nothing from an index (its backend lies in its own tree)."""
    pyproject = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    files = {
        "pyproject.toml": pyproject + f'[project]\nname = "{name}"\nversion = "1.0"\n',
        "backend.py": _BACKEND.format(name=name, action=action),
        "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
    }
    target = folder / f"{name}-1.0.tar.gz"
    with tarfile.open(target, "w:gz") as t:
        for path, text in files.items():
            entry = tarfile.TarInfo(f"{name}-1.0/{path}")
            entry.size = len(text.encode())
            entry.mode = 0o644
            t.addfile(entry, io.BytesIO(text.encode()))
    return target
