"""Programs of commits: git worktrees, which are always removed, and an environment that imports them."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dlrm_bench.bench.machine.source import git

_REMOVAL = """
cat
git -C "$1" worktree remove --force "$2/tree"
rm -rf "$2"
"""
"""Program that removes a worktree once its standard input closes: when the process that made the worktree ends in any
way."""


def check_checkout(root: Path) -> None:
    """ValueError if `root` is no checkout, or git cannot read it: then it has no commits, whatever is fetched.

    An installed package may lie within a checkout of another program, which git would find.
    """
    if not (root / ".git").exists() or git(root, "rev-parse", "--git-dir") is None:
        raise ValueError(
            f"{root} is no checkout that git can read (`git -C {root} status` says why): run `dlrm-bench` of a checkout"
        )


@contextmanager
def worktree(root: Path, commit: str) -> Iterator[Path]:
    """Yields a worktree of a commit of the checkout at `root`. ValueError if git cannot make it."""
    folder = tempfile.mkdtemp(prefix="dlrm-bench-rerun-")
    tree = Path(folder) / "tree"
    # A process in its own session removes the tree, because this process may be killed; no child inherits the other end
    # of the pipe.
    removal = subprocess.Popen(
        ["sh", "-c", _REMOVAL, "sh", str(root), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with removal:  # closes the pipe, and waits
        if git(root, "worktree", "add", "--detach", "--quiet", str(tree), commit) is None:
            raise ValueError(f"git cannot check {commit} out into {tree}: `git worktree prune` may help")
        yield tree


@contextmanager
def environment_of(tree: Path, commit: str | None) -> Iterator[None]:
    """Makes started processes import the tree's code. `commit` is the commit that they record; None for git's
    answer."""
    before = {name: os.environ.pop(name, None) for name in ("PYTHONPATH", "SOURCE_COMMIT")}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tree), before["PYTHONPATH"]]))
    if commit is not None:
        os.environ["SOURCE_COMMIT"] = commit
    try:
        yield
    finally:
        for name in before:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})
