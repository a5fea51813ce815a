"""Identity of the source code that ran: a hash of its files, and whether a commit holds them.

The hash is the id that git gives to a tree of the program's folders (git's own formats of blobs and trees, "Git
Internals - Git Objects"), so that a commit's hash can be computed without this program:

    git ls-tree COMMIT bench dlrm kernels launch pipeline | git mktree

It is computed from the files that run, in a checkout, in a copy of one, or installed.
"""

import hashlib
import os
import shutil
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

from dlrm_bench.bench.records.schema import Git

PROGRAM = ("bench", "dlrm", "kernels", "launch", "pipeline")
"""Folders of a run's code."""
_SETTINGS = ("pyproject.toml", "requirements")
"""Dependencies of the package and their pinned versions, which affect a run too."""
_NOT_SOURCE = ("__pycache__", ".pyc", ".so", ".egg-info")
"""Endings of files that running, compiling and installing leave beside sources."""
_BUILD = "build"
"""Folder that installing a product leaves in it."""
_EMPTY = hashlib.sha1(b"tree 0\0").digest()


def git_state(root: Path) -> Git:
    """Returns the state of the source at `root`: its hash, its commit, and whether the two belong together.

    The commit is that of the checkout at `root`, or that of the environment variable SOURCE_COMMIT, for a tree that was
    copied to its host: dirty is then None (unknown), unless a checkout holds that commit. Untracked files in the
    program's folders make a checkout dirty: they can be imported. Records, tests and texts do not.
    """
    source = source_hash(root)
    checkout = (root / ".git").exists()
    stated = os.environ.get("SOURCE_COMMIT")
    commit = stated or (git(root, "rev-parse", "HEAD") if checkout else None)
    if not commit:
        return Git(commit=None, dirty=None, source=source)
    committed = source_of_commit(root, commit) if checkout else None
    dirty = None if committed is None else committed != source
    if dirty is False and not stated:
        changes = git(root, "status", "--porcelain", "--untracked-files=no", "--", *_SETTINGS)
        dirty = None if changes is None else changes != ""
    return Git(commit=commit, dirty=dirty, source=source)


def source_hash(root: Path) -> str:
    """Returns the id of the git tree of the program's folders, from their current files."""
    folders = [name for name in PROGRAM if (root / name).is_dir()]
    return _tree_id([(b"40000", name, _folder_id(root / name)) for name in folders])


def copy_source(root: Path, copy: Path) -> None:
    """Copies the program's folders at `root` to `copy`, with all files of `source_hash` and no others; the hash stays
    the same if no file is a link. Links become files: MLPerf's checker treats relative links as broken."""
    unwanted = shutil.ignore_patterns(*(f"*{ending}" for ending in _NOT_SOURCE), _BUILD)
    for name in PROGRAM:
        if (root / name).is_dir():
            shutil.copytree(root / name, copy / name, ignore=unwanted)


def source_of_commit(root: Path, commit: str) -> str | None:
    """Returns the `source_hash` of a commit, from the checkout at `root`; None if git does not know the commit."""
    listed = git(root, "ls-tree", commit, *PROGRAM)
    if not listed:
        return None
    entries = []
    for line in listed.splitlines():
        mode, kind, rest = line.split(" ", 2)
        identity, name = rest.split("\t", 1)
        if kind == "tree":
            entries.append((mode.lstrip("0").encode(), name, bytes.fromhex(identity)))
    return _tree_id(entries)


def version(root: Path) -> str:
    """Returns name and version of the program at `root`, its commit as `git_state` knows it, and its source's hash, in
    a line."""
    project = root / "pyproject.toml"
    if project.exists():  # a checkout or a copy of one, whatever else is installed
        number = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
    else:
        number = metadata.version("dlrm-bench")
    state = git_state(root)
    commit = f", commit {state['commit'][:12]}{' and changes' if state['dirty'] else ''}" if state["commit"] else ""
    return f"dlrm-bench {number}{commit}, source {(state.get('source') or '')[:12]}"


def git(root: Path, *arguments: str) -> str | None:
    """Returns the output of a git command; None if it fails, or there is no git."""
    try:
        process = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None


def _folder_id(folder: Path) -> bytes:
    entries = []
    for path in folder.iterdir():
        if path.name.endswith(_NOT_SOURCE) or path.name == _BUILD:
            continue
        if path.is_symlink():
            entries.append((b"120000", path.name, _blob_id(os.fsencode(os.readlink(path)))))
        elif path.is_dir():
            identity = _folder_id(path)
            if identity != _EMPTY:  # git keeps no empty folders
                entries.append((b"40000", path.name, identity))
        else:
            mode = b"100755" if os.access(path, os.X_OK) else b"100644"
            entries.append((mode, path.name, _blob_id(path.read_bytes())))
    return bytes.fromhex(_tree_id(entries))


def _tree_id(entries: list[tuple[bytes, str, bytes]]) -> str:
    """Returns the id of a tree of (mode, name, id). Git sorts folders as if their names ended in a slash."""
    ordered = sorted(entries, key=lambda entry: entry[1].encode() + (b"/" if entry[0] == b"40000" else b""))
    content = b"".join(b"%s %s\0%s" % (mode, name.encode(), identity) for mode, name, identity in ordered)
    return hashlib.sha1(b"tree %d\0%s" % (len(content), content)).hexdigest()


def _blob_id(content: bytes) -> bytes:
    return hashlib.sha1(b"blob %d\0%s" % (len(content), content)).digest()
